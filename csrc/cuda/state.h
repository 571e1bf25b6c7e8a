// The small kernels over query rows without keys: finalize, merge, delta, and the cast of a finished gradient.
//
//   finalize  out = o / l,  lse = scale m + ln l;  a row that saw nothing gives 0 and -inf
//   merge     (o, m, l) absorbs (other_o, other_m, other_l)
//   delta     rowsum(grad_out out) - grad_lse, and what backward reads: -delta, and -lse log2(e), or -inf where lse is
//   cast      grad_query, rounded to T, into out
//
// All are bound by memory. kLanesPerRow lanes share a row and take 16 bytes of float (4 elements) or, in
// delta, of T (8 elements) at a time side by side; rows that are not aligned to that are read and written by element.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "cuda/ptx.h"
#include "cuda/shapes.h"

namespace ringattn::cuda {

// kCount neighbours of a row, as float. One access if `aligned`, else one per element.
template <int kCount>
struct Elements {
  float x[kCount];

  template <DType T>
  __device__ __forceinline__ static Elements load(const void* row, int column, bool aligned) {
    const auto* from = static_cast<const std::uint16_t*>(row) + column;
    std::uint32_t words[kCount / 2];
    if (aligned) {
      if constexpr (kCount == 8) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
      } else {
        const uint2 all = *reinterpret_cast<const uint2*>(from);
        words[0] = all.x, words[1] = all.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) words[i] = from[2 * i] | std::uint32_t{from[2 * i + 1]} << 16;
    }
    Elements result;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float2 pair = unpack<T>(words[i]);
      result.x[2 * i] = pair.x, result.x[2 * i + 1] = pair.y;
    }
    return result;
  }

  template <DType T>
  __device__ __forceinline__ void store(void* row, int column, bool aligned) const {
    static_assert(kCount == 4);
    auto* to = static_cast<std::uint16_t*>(row) + column;
    const std::uint32_t words[2] = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3])};
    if (aligned) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = static_cast<std::uint16_t>(words[i / 2] >> 16 * (i % 2));
    }
  }

  __device__ __forceinline__ static Elements load_float(const float* row, int column, bool aligned) {
    static_assert(kCount == 4);
    const float* from = row + column;
    if (!aligned) return {from[0], from[1], from[2], from[3]};
    const float4 all = *reinterpret_cast<const float4*>(from);
    return {all.x, all.y, all.z, all.w};
  }

  __device__ __forceinline__ void store_float(float* row, int column, bool aligned) const {
    static_assert(kCount == 4);
    float* to = row + column;
    if (aligned) {
      *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = x[i];
    }
  }
};

// The row that a lane works on, one of those of a tile, and its share of the row's columns.
struct QueryRow {
  std::int32_t batch, head, token;
  int lane;          // of kLanesPerRow
  std::int64_t row;  // among the [B, Hq, Sq] rows
  bool exists;

  __device__ __forceinline__ static QueryRow of(const Params& params) {
    const BlockArgs& block = params.block;
    const auto index = static_cast<std::int32_t>(blockIdx.x),
               row_of_tile = static_cast<std::int32_t>(threadIdx.x) / kLanesPerRow;
    const auto heads = static_cast<std::int32_t>(block.Hq);
    const std::int32_t any_head = index / params.query_tiles, tile = index - any_head * params.query_tiles;
    QueryRow place;
    place.batch = any_head / heads;
    place.head = any_head - place.batch * heads;
    place.token = tile * (kSmallKernelThreads / kLanesPerRow) + row_of_tile;
    place.lane = static_cast<int>(threadIdx.x) % kLanesPerRow;
    place.row = any_head * block.Sq + place.token;
    place.exists = place.token < block.Sq;
    return place;
  }

  // The start of the row, among rows whose elements have `size` bytes.
  __device__ __forceinline__ char* in(const Rows& rows, int size) const {
    return static_cast<char*>(rows.data) +
           size * (batch * rows.batch_stride + head * rows.head_stride + token * rows.token_stride);
  }
};

template <DType T>
__device__ __forceinline__ void finalize(const Params& params) {
  const BlockArgs& block = params.block;
  const QueryRow place = QueryRow::of(params);
  if (!place.exists) return;
  const float l = static_cast<const float*>(block.l)[place.row];
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  if (place.lane == 0) {
    static_cast<float*>(block.lse)[place.row] =
        l == 0.0f ? -INFINITY
                  : fmaf(static_cast<const float*>(block.m)[place.row], static_cast<float>(block.scale), log_approx(l));
  }
  const float* o = static_cast<const float*>(block.o) + place.row * block.D;
  char* out = place.in(block.out, 2);
#pragma unroll 4
  for (int column = 4 * place.lane; column < block.D; column += 4 * kLanesPerRow) {
    auto x = Elements<4>::load_float(o, column, params.aligned);
#pragma unroll
    for (float& one : x.x) one = l == 0.0f ? 0.0f : one * inverse;
    x.store<T>(out, column, params.aligned);
  }
}

// A state whose reference is -inf weighs nothing beside one whose reference is larger, even if it holds NaN: all its
// scores were -inf. The rules are those of cpu/state.cpp.
__device__ __forceinline__ void merge(const Params& params) {
  const BlockArgs& block = params.block;
  const QueryRow place = QueryRow::of(params);
  auto *m = static_cast<float*>(block.m) + place.row, *l = static_cast<float*>(block.l) + place.row;
  float own_m = -INFINITY, own_l = 0.0f, other_m = -INFINITY, other_l = 0.0f;
  if (place.exists) {  // others write the rows of other heads meanwhile
    own_m = *m, own_l = *l;
    other_m = static_cast<const float*>(block.other_m)[place.row];
    other_l = static_cast<const float*>(block.other_l)[place.row];
  }
  __syncwarp();  // all lanes have read what one of them writes
  const bool is_empty = own_m == -INFINITY && (own_l == 0.0f || other_m != -INFINITY);
  if (!place.exists || (!is_empty && other_m == -INFINITY)) return;
  const float largest = other_m > own_m || other_m != other_m ? other_m : own_m;
  const float factor = exp2_approx((own_m - largest) * params.scale_log2);
  const float other_factor = exp2_approx((other_m - largest) * params.scale_log2);
  if (place.lane == 0) {
    *m = is_empty ? other_m : largest;
    *l = is_empty ? other_l : own_l * factor + other_l * other_factor;
  }
  auto* o = static_cast<float*>(block.o) + place.row * block.D;
  const auto* other_o = static_cast<const float*>(block.other_o) + place.row * block.D;
#pragma unroll 4
  for (int column = 4 * place.lane; column < block.D; column += 4 * kLanesPerRow) {
    auto x = Elements<4>::load_float(other_o, column, params.aligned);
    if (!is_empty) {
      const auto own = Elements<4>::load_float(o, column, params.aligned);
#pragma unroll
      for (int i = 0; i < 4; ++i) x.x[i] = own.x[i] * factor + x.x[i] * other_factor;
    }
    x.store_float(o, column, params.aligned);
  }
}

template <DType T>
__device__ __forceinline__ void delta(const Params& params) {
  const BlockArgs& block = params.block;
  const QueryRow place = QueryRow::of(params);
  const char *out = place.in(block.out, 2), *grad_out = place.in(block.grad_out, 2);
  const int columns = place.exists ? static_cast<int>(block.D) : 0;
  float sum = 0.0f;
#pragma unroll 4
  for (int column = 8 * place.lane; column < columns; column += 8 * kLanesPerRow) {
    const auto x = Elements<8>::load<T>(out, column, params.aligned);
    const auto y = Elements<8>::load<T>(grad_out, column, params.aligned);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x.x[i], y.x[i], sum);
  }
#pragma unroll
  for (int other = kLanesPerRow / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, other);
  if (!place.exists || place.lane != 0) return;
  const auto* grad_lse = static_cast<const float*>(block.grad_lse);
  const float delta = grad_lse == nullptr ? sum : sum - grad_lse[place.row];
  static_cast<float*>(block.delta)[place.row] = delta;
  if (block.minus_delta == nullptr) return;
  const float lse = static_cast<const float*>(block.lse)[place.row];
  static_cast<float*>(block.minus_delta)[place.row] = -delta;
  static_cast<float*>(block.minus_lse_log2)[place.row] = lse == -INFINITY ? -INFINITY : lse * -1.44269504f;
}

template <DType T>
__device__ __forceinline__ void cast(const Params& params) {
  const BlockArgs& block = params.block;
  const QueryRow place = QueryRow::of(params);
  if (!place.exists) return;
  const auto* from = reinterpret_cast<const float*>(place.in(block.grad_query, 4));
  char* out = place.in(block.out, 2);
#pragma unroll 4
  for (int column = 4 * place.lane; column < block.D; column += 4 * kLanesPerRow) {
    Elements<4>::load_float(from, column, params.aligned).store<T>(out, column, params.aligned);
  }
}

}  // namespace ringattn::cuda
