// The backward ring: see backward.cpp for how it turns.
#pragma once

#include <vector>

#include "core/schedule.h"
#include "ring/pass.h"

namespace ringattn {

struct BackwardTensors {
  at::Tensor query, key, value, out, lse, kept, grad_out;
  at::Tensor grad_lse;  // undefined: zero

  std::vector<BackwardStep> steps;
  at::Tensor delta;
  at::Tensor minus_delta, minus_lse_log2;       // for devices with streams; undefined elsewhere
  at::Tensor grad_query, grad_key, grad_value;  // results; undefined if not wanted
  at::Tensor query_accumulator;                 // the result itself if it has the accumulation type
  at::Tensor blocks[kBlockBuffers];             // undefined unless the ring turns
  at::Tensor gradients[kGradientBuffers];       // likewise; the first also where results need a wider accumulator
};

// Decides the schedule and takes what a backward pass needs beside its inputs: new tensors for its results, the rest
// from `lease`, which must last as long as the pass.
void allocate_backward(const Pass& pass, int rank, const Device& device, BackwardTensors& tensors, Lease& lease);

// Fills the wanted results. `transport` may be null in a ring of one.
void ring_backward(const Pass& pass, int rank, Transport* transport, const Device& device, BackwardTensors& tensors);

}  // namespace ringattn
