// The gather ring: every rank's part of a sharded tensor visits every rank, and each writes it to its place in the
// whole tensor. The same two buffers and P-1 hops as a forward pass without a mask.
#include "ring/gather.h"

#include <ATen/Functions.h>

namespace ringattn {
namespace {

// The places of one segment along dim, as a view.
at::Tensor places(const at::Tensor& whole, std::int64_t dim, const Segment& segment) {
  return whole.slice(dim, segment.start, std::int64_t{segment.last()} + 1, segment.stride);
}

}  // namespace

at::Tensor take_segments(const at::Tensor& whole, std::int64_t dim, const Segments& segments) {
  std::vector<at::Tensor> parts;
  for (const Segment& segment : segments) parts.push_back(places(whole, dim, segment));
  if (parts.empty()) parts.push_back(whole.slice(dim, 0, 0));
  return parts.size() == 1 ? parts[0].clone(at::MemoryFormat::Contiguous) : at::cat(parts, dim).contiguous();
}

void put_segments(at::Tensor& whole, std::int64_t dim, const Segments& segments, const at::Tensor& part) {
  std::int64_t offset = 0;
  for (const Segment& segment : segments) {
    places(whole, dim, segment).copy_(part.narrow(dim, offset, segment.length));
    offset += segment.length;
  }
}

GatherTensors allocate_gather(const Layout& layout, const at::Tensor& part, std::int64_t dim, Lease& lease) {
  GatherTensors tensors;
  std::vector<std::int64_t> shape = part.sizes().vec();
  shape[dim] = layout.seq_len();
  tensors.whole = at::empty(shape, part.options());
  shape[dim] = layout.capacity();
  if (layout.world_size() > 1) {
    constexpr Slot slots[kBlockBuffers] = {Slot::block0, Slot::block1};
    for (int i = 0; i < kBlockBuffers; ++i) {
      tensors.buffers[i] = lease.empty(slots[i], {c10::multiply_integers(shape)}, part.options());
    }
  }
  return tensors;
}

void ring_gather(const Layout& layout, int rank, Transport* transport, const at::Tensor& part, std::int64_t dim,
                 GatherTensors& tensors) {
  const int P = layout.world_size();
  if (P == 1) return put_segments(tensors.whole, dim, layout.segments(0), part);

  const auto part_of = [&](int owner, int buffer) {
    std::vector<std::int64_t> shape = part.sizes().vec();
    shape[dim] = layout.length(owner);
    return tensors.buffers[buffer].narrow(0, 0, c10::multiply_integers(shape)).view(shape);
  };
  part_of(rank, 0).copy_(part);
  for (int s = 0; s < P; ++s) {
    const int owner = (rank - s + P) % P, next = (rank - s - 1 + P) % P;
    const at::Tensor in_hand = part_of(owner, s % kBlockBuffers);
    std::unique_ptr<Exchange> exchange;
    if (s + 1 < P) {
      exchange = transport->post({{in_hand, (rank + 1) % P}},
                                 {{part_of(next, (s + 1) % kBlockBuffers), (rank - 1 + P) % P}}, {"hop", s, P - 1});
    }
    put_segments(tensors.whole, dim, layout.segments(owner), in_hand);
    if (exchange) exchange->wait();
  }
}

}  // namespace ringattn
