// A pass: one forward or backward turn of the ring, checked and ready to run. Nothing here or in the loops is specific
// to a device: kernels are reached through the table, tensors are packed and added by ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/transport.h"
#include "core/header.h"
#include "core/kernels.h"
#include "core/layout.h"
#include "core/mask.h"
#include "core/schedule.h"

namespace ringattn {

struct Pass {
  DType dtype = DType::float32;
  at::ScalarType input_type = at::kFloat;
  at::ScalarType accumulation_type = at::kFloat;  // double for double, else float
  std::int64_t B = 0, Hq = 0, Hkv = 0, D = 0;
  Layout query_layout{LayoutKind::contiguous, 1, 0};
  Layout key_layout{LayoutKind::contiguous, 1, 0};
  Mask mask;
  std::vector<std::int32_t> document_bounds;  // what mask.document_bounds points into, if it is set
  bool is_causal = false;                     // as the caller said; the mask has it as right = 0
  double scale = 1.0;
  bool deterministic = true;
  bool needs_grad_query = false, needs_grad_key = false, needs_grad_value = false;

  Pass() = default;
  Pass(const Pass&) = delete;  // mask points into document_bounds
  Pass& operator=(const Pass&) = delete;
  Pass(Pass&&) = default;
  Pass& operator=(Pass&&) = default;

  int world_size() const { return query_layout.world_size(); }

  // The fields on which all ranks must agree.
  void describe(CallHeader& header) const;

  // The arguments that all kernel calls of a rank share: sizes, segments of its queries, mask, scale.
  BlockArgs block_args(int rank) const;
};

// The kernels of a device and where to launch them.
struct Device {
  const KernelTable* kernels = nullptr;
  Launch launch;
};

Rows rows(const at::Tensor& tensor);  // [B, H, S, D]

// The shape of results: like `tensor`, contiguous, or as [B, S, H, D] in memory if its heads lie closer than its
// tokens.
at::Tensor empty_rows_like(const at::Tensor& tensor, at::ScalarType type);

// Keys and values of one block, packed into one buffer so that a hop is one message; and likewise their gradients.
// A buffer is flat and has room for the largest block; a block of L tokens takes its first parts * B * Hkv * L * D
// elements, one [B, Hkv, L, D] array after the other.
struct PackedBlock {
  PackedBlock(const at::Tensor& buffer, const Pass& pass, int block, int parts);
  at::Tensor message;             // the elements in use
  std::vector<at::Tensor> parts;  // views, [B, Hkv, L, D]
};

std::int64_t packed_size(const Pass& pass, int parts);  // elements of a buffer

// --- forward ---

struct ForwardTensors {
  at::Tensor query, key, value;  // this rank's; last stride 1

  at::Tensor out, lse;
  at::Tensor o, m, l;                // the carried state; undefined if the ring does not turn
  at::Tensor blocks[kBlockBuffers];  // undefined in a ring of one; the first alone if the ring does not turn
};

// Allocates everything a forward pass needs beside its inputs.
ForwardTensors allocate_forward(const Pass& pass, at::Tensor query, at::Tensor key, at::Tensor value);

// Fills out and lse. Returns the buffer with the block on which the pass ended, which backward starts from; an empty
// tensor in a ring of one. `transport` may be null in a ring of one.
at::Tensor ring_forward(const Pass& pass, int rank, Transport* transport, const Device& device,
                        ForwardTensors& tensors);

// --- backward ---

struct BackwardTensors {
  at::Tensor query, key, value, out, lse, kept, grad_out;
  at::Tensor grad_lse;  // undefined: zero

  at::Tensor delta;
  at::Tensor grad_query, grad_key, grad_value;  // results; undefined if not wanted
  at::Tensor query_accumulator;                 // the result itself if it has the accumulation type
  at::Tensor blocks[kBlockBuffers];             // undefined unless the ring turns
  at::Tensor gradients[kGradientBuffers];       // likewise; the first also where results need a wider accumulator
};

void allocate_backward(const Pass& pass, BackwardTensors& tensors);

void ring_backward(const Pass& pass, int rank, Transport* transport, const Device& device, BackwardTensors& tensors);

// --- gather ---

// Passes every rank's part round the ring and returns the whole tensor. `part` has this rank's tokens along `dim`.
at::Tensor ring_gather(const Layout& layout, int rank, Transport* transport, const at::Tensor& part, std::int64_t dim,
                       at::Tensor whole);

// The part of `whole` that lies at the positions of the segments along `dim`, contiguous.
at::Tensor take_segments(const at::Tensor& whole, std::int64_t dim, const Segments& segments);

// Writes `part` to the positions of the segments along `dim` of `whole`.
void put_segments(at::Tensor& whole, std::int64_t dim, const Segments& segments, const at::Tensor& part);

}  // namespace ringattn
