// The gather ring, and the parts of whole tensors that ranks own.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/transport.h"
#include "core/layout.h"
#include "core/schedule.h"
#include "ring/workspace.h"

namespace ringattn {

// The part of `whole` that lies at the positions of the segments along `dim`, contiguous.
at::Tensor take_segments(const at::Tensor& whole, std::int64_t dim, const Segments& segments);

// Writes `part` to the positions of the segments along `dim` of `whole`.
void put_segments(at::Tensor& whole, std::int64_t dim, const Segments& segments, const at::Tensor& part);

struct GatherTensors {
  at::Tensor whole;                   // the result
  at::Tensor buffers[kBlockBuffers];  // undefined in a ring of one
};

// `part` has this rank's tokens along `dim`. `lease` must last as long as the gathering.
GatherTensors allocate_gather(const Layout& layout, const at::Tensor& part, std::int64_t dim, Lease& lease);

// Passes every rank's part round the ring and fills the whole tensor. `transport` may be null in a ring of one.
void ring_gather(const Layout& layout, int rank, Transport* transport, const at::Tensor& part, std::int64_t dim,
                 GatherTensors& tensors);

}  // namespace ringattn
