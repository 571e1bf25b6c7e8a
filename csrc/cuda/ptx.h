// The PTX instructions that the kernels use, one thin function each. Layouts of fragments: g = lane / 4, t = lane % 4.
//
// Nothing here knows about attention. Instructions of one architecture stand in that architecture's folder.
#pragma once

#include <cstdint>
#include <utility>

#include "core/block_args.h"

namespace ringattn::cuda {

// The architecture that this pass compiles for, as in sm_80. Kernel bodies vanish in the host's pass.
#if defined(__CUDA_ARCH__)
inline constexpr int kArch = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArch = 0;
#endif

// Calls body.operator()<0>(), …, <kCount - 1>(): a loop whose index is a constant, as offsets in instructions must be.
template <int kCount, typename Body>
__device__ __forceinline__ void unrolled(Body&& body) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (body.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// The same value, but computed here once: the compiler would rather recompute an address in every tile than keep it.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Read anew: what follows from these need not be kept in registers until it is needed again.
__device__ __forceinline__ std::int32_t block_index() {
  std::int32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ std::int32_t thread_index() {
  std::int32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// --- copies ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, past L1. Asynchronous: until its group is waited for, the destination belongs to the copy.
template <int kSharedOffset, int kGlobalOffset>
__device__ __forceinline__ void copy_async_16(std::uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %3], 16;" ::"r"(shared), "l"(global),
               "n"(kSharedOffset), "n"(kGlobalOffset)
               : "memory");
}

// The same, or 16 zero bytes; then global is not read.
__device__ __forceinline__ void copy_async_16_or_zero(std::uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(copy ? 16 : 0)
               : "memory");
}

template <int kSharedOffset>
__device__ __forceinline__ void copy_async_4_or_zero(std::uint32_t shared, const void* global, bool copy) {
  asm volatile("cp.async.ca.shared.global [%0 + %3], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(copy ? 4 : 0),
               "n"(kSharedOffset)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void store_shared_16(std::uint32_t shared, const std::uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_16(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Spelled out: the compiler takes an assignment of a uint4 apart where its elements come from elsewhere.
__device__ __forceinline__ void store_global_16(void* global, const std::uint32_t (&r)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

template <int kOffset>
__device__ __forceinline__ void store_shared_4(std::uint32_t shared, std::uint32_t r) {
  asm volatile("st.shared.b32 [%0 + %2], %1;" ::"r"(shared), "r"(r), "n"(kOffset) : "memory");
}

template <int kOffset>
__device__ __forceinline__ float2 load_shared_float2(std::uint32_t shared) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2 + %3];" : "=f"(r.x), "=f"(r.y) : "r"(shared), "n"(kOffset) : "memory");
  return r;
}

// --- matrices --------------------------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements; lanes 8i … 8i + 7 give the addresses of the rows of matrix i.
template <int kOffset>
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared), "n"(kOffset)
               : "memory");
}

template <int kOffset>
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared), "n"(kOffset)
               : "memory");
}

// d [16, 8] = a [16, 16] b [16, 8] + c. d[i]: row g + 8 (i / 2), column 2t + i % 2.
template <DType T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1, float c0, float c1, float c2, float c3) {
  if constexpr (T == DType::bfloat16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c0), "f"(c1), "f"(c2), "f"(c3));
  }
}

// d += a b
template <DType T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  multiply_add<T>(d, a, b0, b1, d[0], d[1], d[2], d[3]);
}

// d = a b
template <DType T>
__device__ __forceinline__ void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  multiply_add<T>(d, a, b0, b1, 0.0f, 0.0f, 0.0f, 0.0f);
}

// --- numbers ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// The natural logarithm, to 3e-7 absolutely around 1, relatively elsewhere.
__device__ __forceinline__ float log_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r * 0.693147181f;
}

// Two floats, rounded to T, in one register; low is the element with the lower index.
template <DType T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t r;
  if constexpr (T == DType::bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

template <DType T>
__device__ __forceinline__ float2 unpack(std::uint32_t r) {
  if constexpr (T == DType::bfloat16) {
    return {__uint_as_float(r << 16), __uint_as_float(r & 0xffff0000u)};
  } else {
    float2 f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(f.x), "=f"(f.y) : "r"(r));
    return f;
  }
}

// Adds without returning; lanes and blocks may meet at one address.
template <int kOffset>
__device__ __forceinline__ void add_global(float* global, float x) {
  asm volatile("red.global.add.f32 [%0 + %2], %1;" ::"l"(global), "f"(x), "n"(kOffset) : "memory");
}

// --- lanes -----------------------------------------------------------------------------------------------------------

inline constexpr std::uint32_t kWholeWarp = 0xffffffffu;

// The four lanes that share a row of a fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 1));
  return fmaxf(x, __shfl_xor_sync(kWholeWarp, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kWholeWarp, x, 1);
  return x + __shfl_xor_sync(kWholeWarp, x, 2);
}

}  // namespace ringattn::cuda
