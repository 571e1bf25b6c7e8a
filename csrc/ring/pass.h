// A pass: one forward or backward turn of the ring, checked, and what both directions need to run it. Nothing here or
// in the loops is specific to a device: kernels are reached through the table, tensors are packed and added by ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "comm/transport.h"
#include "core/header.h"
#include "core/kernels.h"
#include "core/layout.h"
#include "core/mask.h"
#include "core/schedule.h"
#include "ring/workspace.h"

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
  at::Tensor device_documents;                // where kernels read them instead, if that is not the host's memory
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
  bool needs_grad() const { return needs_grad_query || needs_grad_key || needs_grad_value; }

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

// A scope of the profiler around one step, as in "ring step 2: block 1, causal"; a range under emit_nvtx.
class StepScope {
 public:
  StepScope(const Pass& pass, const char* direction, std::size_t step, int block, Visibility visibility);

 private:
  std::string name_;  // the record only refers to it
  at::RecordFunction record_;
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

// Elements of what forward keeps for backward: none in a ring of one, or where no gradient is wanted.
std::int64_t kept_size(const Pass& pass);

// The block that the next kernel call works on: its segments and its rows.
void set_block(BlockArgs& args, const Pass& pass, int block, const at::Tensor& key, const at::Tensor& value);

}  // namespace ringattn
