// The launch plan for Python: plan(kind, arch, fields) -> [(kernel, grid, threads, shared_bytes, parameter bytes)].
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <map>
#include <string>

#include "cuda/plan.h"

namespace py = pybind11;
using namespace ringattn;

namespace {

void* pointer(const py::handle& address) { return reinterpret_cast<void*>(address.cast<std::uintptr_t>()); }

DType dtype(const std::string& name) {
  return name == "bf16" ? DType::bfloat16 : name == "fp16" ? DType::float16 : DType::float32;
}

// (address, batch_stride, head_stride, token_stride)
Rows rows(const py::handle& given) {
  const auto t = given.cast<py::tuple>();
  return {pointer(t[0]), t[1].cast<std::int64_t>(), t[2].cast<std::int64_t>(), t[3].cast<std::int64_t>()};
}

// [(start, stride, length), …]
Segments segments(const py::handle& given) {
  Segments result;
  for (const py::handle& one : given) {
    const auto t = one.cast<py::tuple>();
    result.items[result.count++] = {t[0].cast<std::int32_t>(), t[1].cast<std::int32_t>(), t[2].cast<std::int32_t>()};
  }
  return result;
}

// How one Python value becomes a field, by the field's type.
void assign(std::int64_t& field, const py::handle& value) { field = value.cast<std::int64_t>(); }
void assign(double& field, const py::handle& value) { field = value.cast<double>(); }
void assign(bool& field, const py::handle& value) { field = value.cast<bool>(); }
void assign(void*& field, const py::handle& value) { field = pointer(value); }
void assign(const void*& field, const py::handle& value) { field = pointer(value); }
void assign(Rows& field, const py::handle& value) { field = rows(value); }
void assign(Segments& field, const py::handle& value) { field = segments(value); }
void assign(DType& field, const py::handle& value) { field = dtype(value.cast<std::string>()); }

using Setter = std::function<void(BlockArgs&, const py::handle&)>;

template <typename Field>
Setter setter(Field BlockArgs::* field) {
  return [field](BlockArgs& block, const py::handle& value) { assign(block.*field, value); };
}

const std::map<std::string, Setter>& setters() {
  using B = BlockArgs;
  static const std::map<std::string, Setter> table{
      {"dtype", setter(&B::dtype)},
      {"B", setter(&B::B)},
      {"Hq", setter(&B::Hq)},
      {"Hkv", setter(&B::Hkv)},
      {"Sq", setter(&B::Sq)},
      {"Skv", setter(&B::Skv)},
      {"D", setter(&B::D)},
      {"scale", setter(&B::scale)},
      {"query_segments", setter(&B::query_segments)},
      {"key_segments", setter(&B::key_segments)},
      {"key_count", [](B& b, const py::handle& value) { b.mask.key_count = value.cast<std::int32_t>(); }},
      {"left", [](B& b, const py::handle& value) { b.mask.left = value.cast<std::int32_t>(); }},
      {"right", [](B& b, const py::handle& value) { b.mask.right = value.cast<std::int32_t>(); }},
      {"document_bounds",
       [](B& b, const py::handle& value) { b.mask.document_bounds = static_cast<std::int32_t*>(pointer(value)); }},
      {"document_count", [](B& b, const py::handle& value) { b.mask.document_count = value.cast<std::int32_t>(); }},
      {"query", setter(&B::query)},
      {"key", setter(&B::key)},
      {"value", setter(&B::value)},
      {"out", setter(&B::out)},
      {"grad_out", setter(&B::grad_out)},
      {"grad_query", setter(&B::grad_query)},
      {"grad_key", setter(&B::grad_key)},
      {"grad_value", setter(&B::grad_value)},
      {"o", setter(&B::o)},
      {"m", setter(&B::m)},
      {"l", setter(&B::l)},
      {"other_o", setter(&B::other_o)},
      {"other_m", setter(&B::other_m)},
      {"other_l", setter(&B::other_l)},
      {"lse", setter(&B::lse)},
      {"delta", setter(&B::delta)},
      {"minus_lse_log2", setter(&B::minus_lse_log2)},
      {"minus_delta", setter(&B::minus_delta)},
      {"grad_lse", setter(&B::grad_lse)},
      {"load_state", setter(&B::load_state)},
      {"store_state", setter(&B::store_state)},
      {"finalize", setter(&B::finalize)},
      {"deterministic", setter(&B::deterministic)},
  };
  return table;
}

BlockArgs block_of(const py::dict& fields) {
  BlockArgs block;
  for (const auto& [key, value] : fields) {
    const auto found = setters().find(key.cast<std::string>());
    if (found == setters().end()) throw py::key_error(key.cast<std::string>());
    found->second(block, value);
  }
  return block;
}

std::vector<cuda::LaunchPlan> plan_of(const std::string& kind, const BlockArgs& block, int arch) {
  if (kind == "forward") return cuda::plan_forward(block, arch);
  if (kind == "backward") return cuda::plan_backward(block, arch);
  if (kind == "finalize") return cuda::plan_finalize(block);
  if (kind == "merge") return cuda::plan_merge(block);
  if (kind == "delta") return cuda::plan_delta(block);
  if (kind == "cast") return cuda::plan_cast(block);
  throw py::key_error(kind);
}

}  // namespace

PYBIND11_MODULE(_plan, m) {
  m.def("plan", [](const std::string& kind, int arch, const py::dict& fields) {
    py::list plans;
    for (const cuda::LaunchPlan& plan : plan_of(kind, block_of(fields), arch)) {
      plans.append(py::make_tuple(plan.kernel, plan.grid, plan.threads, plan.shared_bytes,
                                  py::bytes(reinterpret_cast<const char*>(&plan.params), sizeof(plan.params))));
    }
    return plans;
  });
  m.def("shape", [](const std::string& kernel, int arch, int head_dim) {
    const auto which = kernel == "forward"         ? cuda::Kernel::forward
                       : kernel == "backward_keys" ? cuda::Kernel::backward_keys
                                                   : cuda::Kernel::backward_queries;
    const cuda::Shape s = cuda::shape_of(which, arch, head_dim);
    return py::dict(py::arg("queries") = s.queries, py::arg("keys") = s.keys,
                    py::arg("score_columns") = s.score_columns, py::arg("warps") = s.warps,
                    py::arg("tiles_per_warp") = s.tiles_per_warp, py::arg("column_warps") = s.column_warps,
                    py::arg("stages") = s.stages, py::arg("blocks") = s.blocks,
                    py::arg("shared_bytes") = cuda::shared_bytes_of(which, s, head_dim, true),
                    py::arg("shared_limit") = cuda::shared_limit(arch));
  });
}
