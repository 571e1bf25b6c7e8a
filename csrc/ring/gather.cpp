// The gather ring: every rank's part of a sharded tensor visits every rank, and each writes it to its place in the
// whole tensor. The same two buffers and P-1 hops as a forward pass without a mask.
#include <ATen/Functions.h>

#include "ring/pass.h"

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
  return (parts.size() == 1 ? parts[0] : at::cat(parts, dim)).clone(at::MemoryFormat::Contiguous);
}

void put_segments(at::Tensor& whole, std::int64_t dim, const Segments& segments, const at::Tensor& part) {
  std::int64_t offset = 0;
  for (const Segment& segment : segments) {
    places(whole, dim, segment).copy_(part.narrow(dim, offset, segment.length));
    offset += segment.length;
  }
}

at::Tensor ring_gather(const Layout& layout, int rank, Transport* transport, const at::Tensor& part, std::int64_t dim,
                       at::Tensor whole) {
  const int P = layout.world_size();
  std::vector<std::int64_t> shape = part.sizes().vec();
  const auto part_of = [&](at::Tensor& buffer, int owner) {
    shape[dim] = layout.length(owner);
    return buffer.narrow(0, 0, c10::multiply_integers(shape)).view(shape);
  };
  shape[dim] = layout.capacity();
  const std::int64_t room = c10::multiply_integers(shape);
  at::Tensor buffers[kBlockBuffers];
  for (at::Tensor& buffer : buffers) buffer = at::empty({P > 1 ? room : 0}, part.options());

  if (P == 1) {
    put_segments(whole, dim, layout.segments(0), part);
    return whole;
  }
  part_of(buffers[0], rank).copy_(part);
  for (int s = 0; s < P; ++s) {
    const int owner = (rank - s + P) % P, next = (rank - s - 1 + P) % P;
    at::Tensor in_hand = part_of(buffers[s % kBlockBuffers], owner);
    std::unique_ptr<Exchange> exchange;
    if (s + 1 < P) {
      exchange = transport->post({{in_hand, (rank + 1) % P}},
                                 {{part_of(buffers[(s + 1) % kBlockBuffers], next), (rank - 1 + P) % P}});
    }
    put_segments(whole, dim, layout.segments(owner), in_hand);
    if (exchange) exchange->wait();
  }
  return whole;
}

}  // namespace ringattn
