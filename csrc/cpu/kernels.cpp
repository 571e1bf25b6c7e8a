// The kernel table: the one place that turns a DType into a template argument.
#include "cpu/kernels.h"

#include <stdexcept>

#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {
namespace {

template <typename Function>
auto with_storage_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float64:
      return function(double{});
    case DType::float32:
      return function(float{});
    case DType::bfloat16:
      return function(BFloat16{});
    case DType::float16:
      return function(Float16{});
  }
  throw std::invalid_argument("dtype has no value of DType");
}

std::int32_t key_tile(DType, std::int64_t /*head_dim*/) { return kTileKeys; }

void run_forward(const BlockArgs& args, const Launch& launch) {
  with_storage_type(args.dtype, [&](auto value) { forward<decltype(value)>(args, launch); });
}

void run_finalize(const BlockArgs& args, const Launch& launch) {
  with_storage_type(args.dtype, [&](auto value) { finalize<decltype(value)>(args, launch); });
}

void run_merge(const BlockArgs& args, const Launch& launch) {
  with_storage_type(args.dtype, [&](auto value) { merge<decltype(value)>(args, launch); });
}

void run_delta(const BlockArgs& args, const Launch& launch) {
  with_storage_type(args.dtype, [&](auto value) { delta<decltype(value)>(args, launch); });
}

void run_backward(const BlockArgs& args, const Launch& launch) {
  with_storage_type(args.dtype, [&](auto value) { backward<decltype(value)>(args, launch); });
}

}  // namespace

const KernelTable& kernels() {
  static constexpr KernelTable table = {.key_tile = key_tile,
                                        .forward = run_forward,
                                        .finalize = run_finalize,
                                        .merge = run_merge,
                                        .delta = run_delta,
                                        .backward = run_backward};
  micro_table();  // a wrong request for an instruction set is refused here, not inside a task
  return table;
}

}  // namespace ringattn::cpu
