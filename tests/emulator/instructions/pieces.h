// What bulk and tensor copies are made of: runs of bytes.
#pragma once

#include <vector>

#include "../machine/decoder.h"
#include "access.h"
#include "tensor_map.h"

namespace emulator {

// A run of at most 16 bytes of a copy: shared address, global address; outside: no global bytes, filled instead.
struct Piece {
  uint32_t shared;
  uint64_t global;
  int bytes;
  bool outside;
};

// One lane's copy; element: what a tensor map says its elements are, none for a linear copy.
struct Copy {
  std::vector<Piece> pieces;
  Type element = Type::none;
  bool fill_nan = false, flush = false;
};

Copy copy_of_lane(Warp& w, const Instruction& in,
                  int lane);  // a: shared, b: global or map, c: bytes, list: coordinates
int64_t bytes_of_pieces(const std::vector<Piece>& pieces);
void load_piece(const Copy& copy, const Piece& piece, const uint8_t* from, uint8_t (&to)[16]);  // from: null outside
void count_pieces(Warp& w, const std::vector<Piece>& pieces, Access access);  // bytes and sectors of global memory

}  // namespace emulator
