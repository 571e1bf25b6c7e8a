// ringattn_ext._C: core's classes for Python (sharding, positions, tests, planners), and what Python does for the
// library as its host. Operators register themselves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "binding/python_host.h"
#include "core/error.h"
#include "core/kernels.h"
#include "core/layout.h"
#include "core/mask.h"
#include "core/schedule.h"
#include "cuda/shapes.h"

namespace py = pybind11;
using namespace ringattn;

namespace {

// A mask that owns its documents.
struct OwningMask {
  std::vector<std::int32_t> bounds;
  Mask mask;
};

std::unique_ptr<OwningMask> make_mask(std::int64_t key_count, std::int64_t left, std::int64_t right,
                                      std::optional<std::vector<std::int32_t>> documents) {
  if (key_count < 0 || key_count > Mask::kUnbounded) throw std::invalid_argument("key_count: expected 0 to 2^31 - 1");
  const auto side = [](std::int64_t tokens) {
    if (tokens < -1) throw std::invalid_argument("window: expected entries >= -1");
    return tokens == -1 || tokens > Mask::kUnbounded ? Mask::kUnbounded : static_cast<std::int32_t>(tokens);
  };
  auto owner = std::make_unique<OwningMask>();
  owner->mask.key_count = static_cast<std::int32_t>(key_count);
  owner->mask.left = side(left);
  owner->mask.right = side(right);
  if (documents && key_count > 0) {
    owner->bounds = std::move(*documents);
    if (owner->bounds.size() < 2 || owner->bounds.front() != 0 || owner->bounds.back() != key_count) {
      throw std::invalid_argument("documents: expected bounds from 0 to key_count");
    }
    for (std::size_t i = 1; i < owner->bounds.size(); ++i) {
      if (owner->bounds[i] < owner->bounds[i - 1]) {
        throw std::invalid_argument("documents: expected bounds that do not decrease");
      }
    }
    owner->mask.document_bounds = owner->bounds.data();
    owner->mask.document_count = static_cast<std::int32_t>(owner->bounds.size()) - 1;
  }
  return owner;
}

std::vector<Segment> list_of(const Segments& segments) { return {segments.begin(), segments.end()}; }

void check_ring(const Layout& queries, const Layout& keys, int rank) {
  if (queries.world_size() != keys.world_size()) {
    throw std::invalid_argument("keys: expected a layout over " + std::to_string(queries.world_size()) +
                                " ranks, as queries, got " + std::to_string(keys.world_size()));
  }
  queries.segments(rank);  // throws if there is no such rank
}

void bind_layout(py::module_& m) {
  py::class_<Segment>(m, "Segment", "Global positions start, start + stride, ... that are neighbours on a rank.")
      .def(py::init([](std::int32_t start, std::int32_t stride, std::int32_t length) {
             const std::int64_t last = start + std::int64_t{stride} * (length - 1);
             if (start < 0 || stride < 1 || length < 0 || (length > 0 && last > Mask::kUnbounded)) {
               throw std::invalid_argument("Segment: expected start >= 0, stride >= 1, length >= 0, positions < 2^31");
             }
             return Segment{start, stride, length};
           }),
           py::arg("start"), py::arg("stride"), py::arg("length"))
      .def_readonly("start", &Segment::start)
      .def_readonly("stride", &Segment::stride)
      .def_readonly("length", &Segment::length)
      .def("__repr__", [](const Segment& s) {
        return "Segment(start=" + std::to_string(s.start) + ", stride=" + std::to_string(s.stride) +
               ", length=" + std::to_string(s.length) + ")";
      });

  py::class_<Layout>(m, "Layout", "Which global tokens each rank owns.")
      .def(py::init([](const std::string& kind, std::int64_t world_size, std::int64_t seq_len) {
             return Layout(parse_layout(kind), world_size, seq_len);
           }),
           py::arg("layout"), py::arg("world_size"), py::arg("seq_len"))
      .def(
          "segments", [](const Layout& layout, std::int64_t rank) { return list_of(layout.segments(rank)); },
          py::arg("rank"), "The tokens of one rank, in its local order.")
      .def("length", &Layout::length, py::arg("rank"), "The number of tokens of one rank.")
      .def_property_readonly("capacity", &Layout::capacity, "No rank owns more tokens than this.")
      .def_property_readonly("kind", [](const Layout& layout) { return layout_name(layout.kind()); })
      .def_property_readonly("world_size", &Layout::world_size)
      .def_property_readonly("seq_len", &Layout::seq_len);
}

void bind_mask(py::module_& m) {
  py::enum_<Visibility>(m, "Visibility")
      .value("skip", Visibility::skip)
      .value("partial", Visibility::partial)
      .value("full", Visibility::full);

  py::class_<OwningMask>(m, "Mask", "One interval of visible keys per query.")
      .def(py::init(&make_mask), py::arg("key_count"), py::arg("left") = -1, py::arg("right") = -1,
           py::arg("documents") = py::none())
      .def(
          "interval",
          [](const OwningMask& owner, std::int32_t position) {
            if (position < 0) throw std::invalid_argument("position: expected a number >= 0");
            return py::make_tuple(owner.mask.first_key(position), owner.mask.last_key(position));
          },
          py::arg("position"), "(first, last) key that the query at a global position attends to.");

  m.def(
      "visibility",
      [](const Segment& q, const Segment& k, const OwningMask& owner) { return visibility(q, k, owner.mask); },
      py::arg("queries"), py::arg("keys"), py::arg("mask"));
  m.def(
      "visible_pairs",
      [](const Segment& q, const Segment& k, const OwningMask& owner) {
        return visible_pairs(Segments{{q}, 1}, Segments{{k}, 1}, owner.mask);
      },
      py::arg("queries"), py::arg("keys"), py::arg("mask"));
}

void bind_schedule(py::module_& m) {
  m.attr("OWN_TENSORS") = kOwnTensors;
  m.attr("NONE") = kNone;

  py::class_<ForwardStep>(m, "ForwardStep")
      .def_readonly("block", &ForwardStep::block)
      .def_readonly("visibility", &ForwardStep::visibility)
      .def_readonly("finalize", &ForwardStep::finalize)
      .def_readonly("read_buffer", &ForwardStep::read_buffer)
      .def_readonly("next_block", &ForwardStep::next_block)
      .def_readonly("write_buffer", &ForwardStep::write_buffer)
      .def_readonly("send_to", &ForwardStep::send_to)
      .def_readonly("receive_from", &ForwardStep::receive_from);

  py::enum_<Source>(m, "Source")
      .value("kept", Source::kept)
      .value("received", Source::received)
      .value("own", Source::own);

  py::class_<BackwardStep>(m, "BackwardStep")
      .def_readonly("block", &BackwardStep::block)
      .def_readonly("visibility", &BackwardStep::visibility)
      .def_readonly("source", &BackwardStep::source)
      .def_readonly("read_buffer", &BackwardStep::read_buffer)
      .def_readonly("send_to", &BackwardStep::send_to)
      .def_readonly("receive_from", &BackwardStep::receive_from)
      .def_readonly("next_block", &BackwardStep::next_block)
      .def_readonly("write_buffer", &BackwardStep::write_buffer)
      .def_readonly("local_gradient", &BackwardStep::local_gradient)
      .def_readonly("outgoing_gradient", &BackwardStep::outgoing_gradient)
      .def_readonly("incoming_gradient", &BackwardStep::incoming_gradient)
      .def_readonly("outgoing_block", &BackwardStep::outgoing_block);

  m.def(
      "reach",
      [](const Layout& q, const Layout& k, const OwningMask& owner) {
        check_ring(q, k, 0);
        return reach(q, k, owner.mask);
      },
      py::arg("queries"), py::arg("keys"), py::arg("mask"),
      "The largest distance d such that some rank i may see keys of block i - d (mod P).");
  m.def(
      "forward_schedule",
      [](const Layout& q, const Layout& k, const OwningMask& owner, int rank) {
        check_ring(q, k, rank);
        return forward_schedule(q, k, owner.mask, rank);
      },
      py::arg("queries"), py::arg("keys"), py::arg("mask"), py::arg("rank"));
  m.def(
      "backward_schedule",
      [](const Layout& q, const Layout& k, const OwningMask& owner, int rank) {
        check_ring(q, k, rank);
        return backward_schedule(q, k, owner.mask, rank);
      },
      py::arg("queries"), py::arg("keys"), py::arg("mask"), py::arg("rank"));
}

cuda::Kernel kernel_of(const std::string& name) {
  if (name == "forward") return cuda::Kernel::forward;
  if (name == "backward_keys") return cuda::Kernel::backward_keys;
  if (name == "backward_queries") return cuda::Kernel::backward_queries;
  throw std::invalid_argument("kernel: expected forward, backward_keys or backward_queries, got " + name);
}

cuda::Shape tile_shape(const std::string& kernel, int arch, int head_dim) {
  if (arch < 80) throw std::invalid_argument("arch: expected 80 or newer, got " + std::to_string(arch));
  if (cuda::padded_head_dim(head_dim) != head_dim) {
    throw std::invalid_argument("head_dim: expected 64, 128 or 256, got " + std::to_string(head_dim));
  }
  return cuda::shape_of(kernel_of(kernel), arch, head_dim);
}

// The table of csrc/cuda/shapes.h, which is plain data and there in every build.
void bind_shapes(py::module_& m) {
  py::class_<cuda::Shape>(m, "TileShape")
      .def_readonly("queries", &cuda::Shape::queries)
      .def_readonly("keys", &cuda::Shape::keys)
      .def_readonly("score_columns", &cuda::Shape::score_columns)
      .def_readonly("warps", &cuda::Shape::warps)
      .def_readonly("tiles_per_warp", &cuda::Shape::tiles_per_warp)
      .def_readonly("column_warps", &cuda::Shape::column_warps)
      .def_readonly("stages", &cuda::Shape::stages)
      .def_readonly("blocks", &cuda::Shape::blocks);
  m.def("tile_shape", tile_shape, py::arg("kernel"), py::arg("arch"), py::arg("head_dim"),
        "What a thread block of a CUDA kernel works on; arch as in 80.");
  m.def(
      "tile_shared_bytes",
      [](const std::string& kernel, int arch, int head_dim) {
        const cuda::Shape shape = tile_shape(kernel, arch, head_dim);
        return cuda::shared_bytes_of(kernel_of(kernel), shape, head_dim, true);
      },
      py::arg("kernel"), py::arg("arch"), py::arg("head_dim"));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Layouts, masks and schedules of ringattn_ext's core.";
  bind_layout(m);
  bind_mask(m);
  bind_schedule(m);
  bind_shapes(m);
  m.def("main_thread_is", main_thread_is, py::arg("identifier"),
        "Names the thread on which Python's handlers of signals run, as threading.get_ident does.");
  m.def("host_in_python", host_in_python, py::arg("error_type"), py::arg("is_inherited"),
        "Has ring errors raised as a type of Python, warnings logged, and waits interrupted by signals.");
  m.def(
      "register_kernels",
      [](int device_type, std::uintptr_t table) {
        register_kernels(device_type, reinterpret_cast<const KernelTable*>(table));
      },
      py::arg("device_type"), py::arg("table"),
      "Block kernels of a device from another library: the number of its c10::DeviceType, the address of a KernelTable.");
}
