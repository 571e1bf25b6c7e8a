// shard and gather: a whole tensor to the parts of the ranks, and back.
#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/device.h"
#include "ops/groups.h"
#include "ring/gather.h"

namespace ringattn {
namespace {

std::int64_t check_dim(const at::Tensor& tensor, const char* name, std::int64_t dim) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, name, ": expected at least one dimension, got a scalar");
  TORCH_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(), "dim: expected a number from ", -tensor.dim(), " to ",
                    tensor.dim() - 1, ", got ", dim);
  return dim < 0 ? dim + tensor.dim() : dim;
}

at::Tensor shard_op(const at::Tensor& whole, std::int64_t dim, std::string group, std::string layout) {
  const c10::OptionalDeviceGuard guard(whole.device());
  const Ring ring = Ring::of_group(group);
  dim = check_dim(whole, "x", dim);
  const Segments own = as_value_error(
      [&] { return Layout(parse_layout(layout), ring.world_size, whole.size(dim)).segments(ring.rank); });
  return take_segments(whole, dim, own);
}

at::Tensor gather_op(const at::Tensor& part, const at::Tensor& /*order*/, std::int64_t dim, std::string group,
                     std::string layout_text, std::optional<std::int64_t> seq_len,
                     std::optional<std::int64_t> generation) {
  Ring ring = Ring::of_group(group);
  std::optional<Layout> layout;
  const c10::OptionalDeviceGuard guard(part.device());
  GatherTensors tensors;
  const Call call = call_on(ring, Op::gather, part.device());
  Agreement agreement(ring, call, [&](CallHeader& header, Lease& lease) {
    if (generation) check_generation(ring, *generation);
    dim = check_dim(part, "x", dim);
    const LayoutKind kind = as_value_error([&] { return parse_layout(layout_text); });
    const std::int64_t total = seq_len.value_or(part.size(dim) * ring.world_size);
    layout = as_value_error([&] { return Layout(kind, ring.world_size, total); });
    const std::int64_t expected = layout->length(ring.rank);
    TORCH_CHECK_VALUE(part.size(dim) == expected, "x: expected ", expected, " tokens along dim ", dim, " on rank ",
                      ring.rank, " of ", ring.world_size, " (layout '", layout_text, "', seq_len ", total, "), got ",
                      part.size(dim));
    const at::IntArrayRef sizes = part.sizes();
    header.set(Field::dtype, std::int64_t{static_cast<int>(part.scalar_type())});
    header.set(Field::layout, std::int64_t{static_cast<int>(kind)});
    header.set(Field::seq_len, total);
    header.set(Field::gather_dim, dim);
    header.set(Field::gather_outer, c10::multiply_integers(sizes.slice(0, dim)));
    header.set(Field::gather_inner, c10::multiply_integers(sizes.slice(dim + 1)));
    std::vector<std::int64_t> others = sizes.vec();
    others.erase(others.begin() + dim);
    header.set(Field::gather_sizes, sizes_hash(others));
    check_carrier(ring, "x", part.device());
    lease = ring.lease(call);
    tensors = allocate_gather(*layout, part, dim, lease);
  });
  agreement.carry_out([&] { ring_gather(*layout, ring.rank, ring.transport.get(), part, dim, tensors); });
  return tensors.whole;
}

}  // namespace
}  // namespace ringattn

TORCH_LIBRARY_FRAGMENT(ringattn, m) {
  ringattn::implement<ringattn::shard_op>(m, "shard");
  ringattn::implement<ringattn::gather_op>(m, "gather");
}
