// The forward ring: see forward.cpp for how it turns.
#pragma once

#include <vector>

#include "core/schedule.h"
#include "ring/pass.h"

namespace ringattn {

struct ForwardTensors {
  std::vector<ForwardStep> steps;
  at::Tensor query, key, value;  // this rank's; last stride 1

  at::Tensor out, lse;
  at::Tensor o, m, l;                // the carried state; undefined if the ring does not turn
  at::Tensor blocks[kBlockBuffers];  // undefined in a ring of one; the first alone if the ring does not turn
};

// Decides the schedule and takes everything a forward pass needs beside its inputs: new tensors for what leaves it, the
// rest from `lease`, which must last as long as the pass.
ForwardTensors allocate_forward(const Pass& pass, int rank, at::Tensor query, at::Tensor key, at::Tensor value,
                                Lease& lease);

// Fills out and lse. Returns the buffer with the block on which the pass ended, which backward starts from; an empty
// tensor in a ring of one. `transport` may be null in a ring of one.
at::Tensor ring_forward(const Pass& pass, int rank, Transport* transport, const Device& device,
                        ForwardTensors& tensors);

}  // namespace ringattn
