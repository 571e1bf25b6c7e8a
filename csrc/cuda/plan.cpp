#include "cuda/plan.h"

#include <cmath>
#include <initializer_list>
#include <stdexcept>

namespace ringattn::cuda {
namespace {

constexpr double kLog2E = 1.44269504088896340736;

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::bfloat16:
      return "bf16";
    case DType::float16:
      return "fp16";
    default:
      throw std::invalid_argument("kernels for GPUs take bfloat16 and float16");
  }
}

std::int32_t tiles(std::int64_t tokens, int tile) { return static_cast<std::int32_t>((tokens + tile - 1) / tile); }

bool is_aligned(const void* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// Do all rows start at multiples of 16 bytes? Strides of dimensions of one are never used.
bool is_aligned(const Rows& rows, const BlockArgs& block, int element_size) {
  const std::int64_t elements = 16 / element_size;
  const bool is_key = &rows == &block.key || &rows == &block.value;
  const auto fits = [&](std::int64_t size, std::int64_t stride) { return size <= 1 || stride % elements == 0; };
  return is_aligned(rows.data, 16) && fits(block.B, rows.batch_stride) &&
         fits(is_key ? block.Hkv : block.Hq, rows.head_stride) &&
         fits(is_key ? block.Skv : block.Sq, rows.token_stride);
}

Params params_of(const BlockArgs& block, std::initializer_list<const Rows*> rows) {
  if (block.D % 8 != 0 || block.D <= 0 || block.D > 256) {
    throw std::invalid_argument("kernels for GPUs take a head_dim that is a multiple of 8 and at most 256, not " +
                                std::to_string(block.D));
  }
  Params params;
  params.block = block;
  params.scale_log2 = static_cast<float>(block.scale * kLog2E);
  params.group = static_cast<std::int32_t>(block.Hkv > 0 ? block.Hq / block.Hkv : 1);
  params.minus_scale_log2 = -params.scale_log2;
  for (const Rows* one : rows) {
    if (one->data != nullptr) params.aligned = params.aligned && is_aligned(*one, block, 2);
  }
  params.fills_columns = params.aligned && block.D == padded_head_dim(block.D);
  return params;
}

std::uint32_t grid_of(std::int64_t blocks) {
  if (blocks > INT32_MAX) throw std::invalid_argument("too many tiles for one launch: " + std::to_string(blocks));
  return static_cast<std::uint32_t>(blocks);
}

LaunchPlan tiled(Kernel kernel, const char* kernel_name, const BlockArgs& block, int arch, Params params,
                 bool adds_queries = false) {
  const int head_dim = padded_head_dim(block.D);
  const Shape shape = shape_of(kernel, arch, head_dim);
  params.query_tiles = tiles(block.Sq, shape.queries);
  params.key_tiles = tiles(block.Skv, shape.keys);
  LaunchPlan plan;
  plan.kernel = std::string("ringattn_") + kernel_name + "_" + name_of(block.dtype) + "_" + std::to_string(head_dim);
  plan.grid = grid_of(kernel == Kernel::backward_keys ? block.B * block.Hkv * params.key_tiles
                                                      : block.B * block.Hq * params.query_tiles);
  plan.threads = static_cast<std::uint32_t>(shape.threads());
  plan.shared_bytes = static_cast<std::uint32_t>(shared_bytes_of(kernel, shape, head_dim, adds_queries));
  plan.params = params;
  return plan;
}

// states: float [B, Hq, Sq, D], contiguous, of which only the start may be out of line.
LaunchPlan small(const char* kernel_name, const BlockArgs& block, Params params,
                 std::initializer_list<const void*> states = {}) {
  for (const void* state : states) params.aligned = params.aligned && is_aligned(state, 16);
  params.query_tiles = tiles(block.Sq, kSmallKernelThreads / kLanesPerRow);
  LaunchPlan plan;
  plan.kernel = std::string("ringattn_") + kernel_name + "_" + name_of(block.dtype);
  plan.grid = grid_of(block.B * block.Hq * params.query_tiles);
  plan.threads = kSmallKernelThreads;
  plan.params = params;
  return plan;
}

std::vector<LaunchPlan> unless_empty(std::vector<LaunchPlan> plans) {
  std::erase_if(plans, [](const LaunchPlan& plan) { return plan.grid == 0; });
  return plans;
}

}  // namespace

std::vector<LaunchPlan> plan_forward(const BlockArgs& block, int arch) {
  if ((block.load_state || block.store_state) && !is_aligned(block.o, 8)) {
    throw std::invalid_argument("o starts at a multiple of 8 bytes");
  }
  const Params params = params_of(block, {&block.query, &block.key, &block.value, &block.out});
  return unless_empty({tiled(Kernel::forward, "forward", block, arch, params)});
}

std::vector<LaunchPlan> plan_backward(const BlockArgs& block, int arch) {
  const Params params = params_of(block, {&block.query, &block.key, &block.value, &block.grad_out});
  const bool wants_keys = block.grad_key.data != nullptr || block.grad_value.data != nullptr;
  const bool wants_queries = block.grad_query.data != nullptr;
  const bool adds_queries = wants_keys && wants_queries && !block.deterministic;
  std::vector<LaunchPlan> plans;
  if (block.Sq == 0 || block.Skv == 0) return plans;
  if (wants_keys) {
    plans.push_back(tiled(Kernel::backward_keys, "backward_keys", block, arch, params, adds_queries));
    if (!adds_queries) plans.back().params.block.grad_query.data = nullptr;
  }
  if (wants_queries && !adds_queries) {
    plans.push_back(tiled(Kernel::backward_queries, "backward_queries", block, arch, params));
  }
  return unless_empty(plans);
}

std::vector<LaunchPlan> plan_finalize(const BlockArgs& block) {
  return unless_empty({small("finalize", block, params_of(block, {&block.out}), {block.o})});
}

std::vector<LaunchPlan> plan_merge(const BlockArgs& block) {
  return unless_empty({small("merge", block, params_of(block, {}), {block.o, block.other_o})});
}

std::vector<LaunchPlan> plan_delta(const BlockArgs& block) {
  return unless_empty({small("delta", block, params_of(block, {&block.out, &block.grad_out}))});
}

std::vector<LaunchPlan> plan_cast(const BlockArgs& block) {
  Params params = params_of(block, {&block.out});
  params.aligned = params.aligned && is_aligned(block.grad_query, block, 4);
  return unless_empty({small("cast", block, params)});
}

}  // namespace ringattn::cuda
