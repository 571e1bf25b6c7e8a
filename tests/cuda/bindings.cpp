// The launch plan for Python: plan(kind, arch, fields) -> [(kernel, grid, threads, shared_bytes, parameter bytes)].
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

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

BlockArgs block_of(const py::dict& fields) {
  BlockArgs b;
  for (const auto& [key, value] : fields) {
    const auto name = key.cast<std::string>();
    if (name == "dtype") b.dtype = dtype(value.cast<std::string>());
    else if (name == "B") b.B = value.cast<std::int64_t>();
    else if (name == "Hq") b.Hq = value.cast<std::int64_t>();
    else if (name == "Hkv") b.Hkv = value.cast<std::int64_t>();
    else if (name == "Sq") b.Sq = value.cast<std::int64_t>();
    else if (name == "Skv") b.Skv = value.cast<std::int64_t>();
    else if (name == "D") b.D = value.cast<std::int64_t>();
    else if (name == "scale") b.scale = value.cast<double>();
    else if (name == "query_segments") b.query_segments = segments(value);
    else if (name == "key_segments") b.key_segments = segments(value);
    else if (name == "key_count") b.mask.key_count = value.cast<std::int32_t>();
    else if (name == "left") b.mask.left = value.cast<std::int32_t>();
    else if (name == "right") b.mask.right = value.cast<std::int32_t>();
    else if (name == "document_bounds") b.mask.document_bounds = static_cast<std::int32_t*>(pointer(value));
    else if (name == "document_count") b.mask.document_count = value.cast<std::int32_t>();
    else if (name == "query") b.query = rows(value);
    else if (name == "key") b.key = rows(value);
    else if (name == "value") b.value = rows(value);
    else if (name == "out") b.out = rows(value);
    else if (name == "grad_out") b.grad_out = rows(value);
    else if (name == "grad_query") b.grad_query = rows(value);
    else if (name == "grad_key") b.grad_key = rows(value);
    else if (name == "grad_value") b.grad_value = rows(value);
    else if (name == "o") b.o = pointer(value);
    else if (name == "m") b.m = pointer(value);
    else if (name == "l") b.l = pointer(value);
    else if (name == "other_o") b.other_o = pointer(value);
    else if (name == "other_m") b.other_m = pointer(value);
    else if (name == "other_l") b.other_l = pointer(value);
    else if (name == "lse") b.lse = pointer(value);
    else if (name == "lse_log2") b.lse_log2 = pointer(value);
    else if (name == "delta") b.delta = pointer(value);
    else if (name == "grad_lse") b.grad_lse = pointer(value);
    else if (name == "load_state") b.load_state = value.cast<bool>();
    else if (name == "store_state") b.store_state = value.cast<bool>();
    else if (name == "finalize") b.finalize = value.cast<bool>();
    else if (name == "deterministic") b.deterministic = value.cast<bool>();
    else throw py::key_error(name);
  }
  return b;
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
    return py::dict(py::arg("queries") = s.queries, py::arg("keys") = s.keys, py::arg("score_keys") = s.score_keys, py::arg("warps") = s.warps,
                    py::arg("tiles_per_warp") = s.tiles_per_warp, py::arg("column_warps") = s.column_warps,
                    py::arg("stages") = s.stages, py::arg("blocks") = s.blocks,
                    py::arg("shared_bytes") = cuda::shared_bytes_of(which, s, head_dim, true),
                    py::arg("shared_limit") = cuda::shared_limit(arch));
  });
}
