// What bulk and tensor copies are made of: runs of bytes, and reductions of them into global memory.
#pragma once

#include <string_view>
#include <vector>

#include "../machine/machine.h"
#include "tensor_map.h"

namespace emulator {

// A run of bytes of a copy: shared address, global address; outside: no global bytes, zeros or NaN instead.
struct Piece {
  uint32_t shared;
  uint64_t global;
  int bytes;
  bool outside;
};

TensorMap read_map(Warp& w, uint64_t address, int lane);
std::vector<Piece> pieces_of(const TensorMap& map, const int32_t* start, uint32_t shared);
int64_t bytes_of_pieces(const std::vector<Piece>& pieces);

// Reductions of a store: as atomics, element by element.
enum Reduction { kNone, kAdd, kMin, kMax, kAnd, kOr, kXor, kInc, kDec };
enum Element { kF32, kF16, kBf16, kU32, kS32, kU64, kS64, kF64 };
constexpr std::string_view kElementNames[] = {"f32", "f16", "bf16", "u32", "s32", "u64", "s64", "f64"};

void reduce(int operation, int element, uint8_t* at, const uint8_t* from, int bytes);

}  // namespace emulator
