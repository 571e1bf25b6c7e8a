// The inner loops of one instruction set. CMake compiles this file several times, with RINGATTN_CPU_CAPABILITY naming
// the namespace of its table and compiler flags naming the instructions.
//
// Everything but the table has internal linkage, and no standard header but <cstdint> is seen: code that uses new
// instructions must not be a candidate when the linker merges equal functions of different objects.
#include "cpu/micro.h"

#include "cpu/micro_convert.h"
#include "cpu/micro_few_rows.h"
#include "cpu/micro_few_rows_pairs.h"
#include "cpu/micro_pairs.h"
#include "cpu/micro_product.h"
#include "cpu/micro_softmax.h"

namespace ringattn::cpu::RINGATTN_CPU_CAPABILITY {

extern const MicroTable table;

namespace {

template <typename A>
constexpr Micro<A> micro_of() {
  return {multiply<A>,      add_outer<A>,       column_max<A>, exponentials<A>, advance<A>,
          scale_columns<A>, score_gradients<A>, transpose<A>,  all_finite<A>};
}

constexpr FewRowsLoops few_rows() {
#if defined(__AVX512BF16__)
  constexpr auto attend_bfloat16 = attend_pairs;
#else
  constexpr auto attend_bfloat16 = attend<BFloat16Rows>;
#endif
  return {attend<PlainRows<double>>, attend<PlainRows<float>>, attend_bfloat16,
          attend<Float16Rows>,       absorb<double>,           absorb<float>};
}

constexpr Pairs pairs() {
#if defined(__AVX512BF16__)
  return {multiply_pairs, column_max_pairs, exponentials_pairs, score_gradients_pairs, pair_rows, copy_normal};
#else
  return {};
#endif
}

}  // namespace

constexpr MicroTable table = {
    micro_of<double>(),
    micro_of<float>(),
    {widen_rows<BFloat16Format>, widen_rows<Float16Format>, narrow_row<BFloat16Format>, narrow_row<Float16Format>},
    pairs(),
    few_rows()};

}  // namespace ringattn::cpu::RINGATTN_CPU_CAPABILITY
