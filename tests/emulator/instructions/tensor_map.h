// The emulator's own tensor map, 128 bytes as the driver's; written by tensor_map.py.
#pragma once

#include "../ptx/types.h"

namespace emulator {

struct TensorMap {
  uint32_t magic;
  uint8_t element_bytes, rank, swizzle, fill_nan;  // swizzle: 0 none, 1, 2, 3: 32, 64, 128 bytes
  uint8_t element, flush, data_type,
      reserved[5];  // index into kElementTypes; subnormals load as zero; the driver's name
  uint64_t address;
  uint64_t size[5];    // elements
  uint64_t stride[4];  // bytes, of dimensions 1 to 4
  uint16_t box[5];
  uint8_t step[5];
};
static_assert(sizeof(TensorMap) <= 128);
constexpr uint32_t kTensorMapMagic = 0x54454e53;
constexpr Type kElementTypes[] = {Type::u8,  Type::u16, Type::u32, Type::s32, Type::u64,
                                  Type::s64, Type::f16, Type::f32, Type::f64, Type::bf16};

// The swizzle of an absolute shared-memory address: 16-byte chunks permuted by the 128-byte row they lie in.
constexpr uint32_t swizzle_address(uint32_t address, int mode) {
  return address ^ ((address >> 7 & ((1u << mode) - 1)) << 4);
}

}  // namespace emulator
