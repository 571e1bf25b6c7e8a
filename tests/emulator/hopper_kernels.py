"""What the sm_90a kernels of several tests share: wrappers of instructions, and the modes that each is run in."""

# ruff: noqa: E501 CUDA and PTX texts

MODES = [(copies, seed) for copies in ("early", "late", "random") for seed in (0, 1, 2)]

PRELUDE = r"""
#include <cuda_bf16.h>
#include <cstdint>
struct alignas(64) Map { char bytes[128]; };
__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void init(uint64_t* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ void expect(uint64_t* b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ void arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory"); }
__device__ void wait(uint64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(address(b)), "r"(parity) : "memory");
}
__device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void load_2d(void* s, const Map* m, int x, int y, uint64_t* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(address(s)), "l"(m), "r"(address(b)), "r"(x), "r"(y) : "memory");
}
__device__ void store_2d(const Map* m, int x, int y, const void* s) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(address(s)), "r"(x), "r"(y) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""
