// Kernels over query rows without keys: finalize, merge and delta. A task takes a run of rows of one head.
#include "cpu/state.h"

#include "cpu/scratch.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {
namespace {

constexpr std::int64_t kRowsPerTask = 256;

// Calls row(b, h, token) for every query row.
template <typename Function>
void for_each_row(const BlockArgs& args, const Launch& launch, const Function& row) {
  const std::int64_t runs = (args.Sq + kRowsPerTask - 1) / kRowsPerTask;
  run_tasks(launch, args.B * args.Hq * runs, [&](std::int64_t task) {
    const std::int64_t head = task / runs, first = task % runs * kRowsPerTask;
    const std::int64_t end = std::min(first + kRowsPerTask, args.Sq);
    for (std::int64_t token = first; token < end; ++token) row(head / args.Hq, head % args.Hq, token);
  });
}

// (o, m, l) absorbs (other_o, other_m, other_l). A state whose reference is -inf weighs nothing beside one whose
// reference is larger, even if it holds NaN: all its scores were -inf.
template <typename A>
void merge_row(A* o, A* m, A* l, const A* other_o, A other_m, A other_l, A c, std::int64_t D) {
  const A infinity = std::numeric_limits<A>::infinity();
  const bool is_empty = *m == -infinity && (*l == A{0} || other_m != -infinity);
  if (is_empty) {
    std::copy_n(other_o, D, o);
    *m = other_m;
    *l = other_l;
    return;
  }
  if (other_m == -infinity) return;
  const A largest = other_m > *m || other_m != other_m ? other_m : *m;
  const A factor = std::exp2((*m - largest) * c), other_factor = std::exp2((other_m - largest) * c);
  for (std::int64_t d = 0; d < D; ++d) o[d] = o[d] * factor + other_o[d] * other_factor;
  *l = *l * factor + other_l * other_factor;
  *m = largest;
}

// The sum of a[d] * b[d], in a fixed order that the compiler may vectorise.
template <typename A>
A dot(const A* a, const A* b, std::int64_t D) {
  static_assert(kRowPadding == 16);
  A partial[kRowPadding] = {};
  std::int64_t d = 0;
  for (; d + kRowPadding <= D; d += kRowPadding) {
    for (std::int64_t i = 0; i < kRowPadding; ++i) partial[i] += a[d + i] * b[d + i];
  }
  for (std::int64_t i = 0; d + i < D; ++i) partial[i] += a[d + i] * b[d + i];
  for (std::int64_t width = kRowPadding / 2; width > 0; width /= 2) {
    for (std::int64_t i = 0; i < width; ++i) partial[i] += partial[i + width];
  }
  return partial[0];
}

}  // namespace

template <typename T>
void finalize(const BlockArgs& args, const Launch& launch) {
  using A = Accumulator<T>;
  for_each_row(args, launch, [&](std::int64_t b, std::int64_t h, std::int64_t token) {
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(args.D * static_cast<std::int64_t>(sizeof(A)), 1);
    A* o = scratch.take<A>(args.D);
    const std::int64_t row = state_row(args, b, h) + token;
    std::copy_n(static_cast<const A*>(args.o) + row * args.D, args.D, o);
    finish_row<T>(o, static_cast<const A*>(args.m)[row], static_cast<const A*>(args.l)[row], args.scale, args.D,
                  rows_at<T>(args.out, b, h, token).data, static_cast<A*>(args.lse) + row);
  });
}

template <typename T>
void merge(const BlockArgs& args, const Launch& launch) {
  using A = Accumulator<T>;
  const A c = static_cast<A>(args.scale * kLog2E);
  for_each_row(args, launch, [&](std::int64_t b, std::int64_t h, std::int64_t token) {
    const std::int64_t row = state_row(args, b, h) + token;
    merge_row(static_cast<A*>(args.o) + row * args.D, static_cast<A*>(args.m) + row, static_cast<A*>(args.l) + row,
              static_cast<const A*>(args.other_o) + row * args.D, static_cast<const A*>(args.other_m)[row],
              static_cast<const A*>(args.other_l)[row], c, args.D);
  });
}

template <typename T>
void delta(const BlockArgs& args, const Launch& launch) {
  using A = Accumulator<T>;
  for_each_row(args, launch, [&](std::int64_t b, std::int64_t h, std::int64_t token) {
    Scratch& scratch = Scratch::of_this_thread();
    scratch.reserve(2 * padded(args.D) * static_cast<std::int64_t>(sizeof(A)), 2);
    const auto out =
        rows_in_accumulator<T>(rows_at<const T>(args.out, b, h, token), 1, args.D, scratch.take<A>(padded(args.D)));
    const auto grad_out = rows_in_accumulator<T>(rows_at<const T>(args.grad_out, b, h, token), 1, args.D,
                                                 scratch.take<A>(padded(args.D)));
    const std::int64_t row = state_row(args, b, h) + token;
    const A sum = dot(out.data, grad_out.data, args.D);
    static_cast<A*>(args.delta)[row] = args.grad_lse ? sum - static_cast<const A*>(args.grad_lse)[row] : sum;
  });
}

template void finalize<double>(const BlockArgs&, const Launch&);
template void finalize<float>(const BlockArgs&, const Launch&);
template void finalize<BFloat16>(const BlockArgs&, const Launch&);
template void finalize<Float16>(const BlockArgs&, const Launch&);
template void merge<double>(const BlockArgs&, const Launch&);
template void merge<float>(const BlockArgs&, const Launch&);
template void merge<BFloat16>(const BlockArgs&, const Launch&);
template void merge<Float16>(const BlockArgs&, const Launch&);
template void delta<double>(const BlockArgs&, const Launch&);
template void delta<float>(const BlockArgs&, const Launch&);
template void delta<BFloat16>(const BlockArgs&, const Launch&);
template void delta<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
