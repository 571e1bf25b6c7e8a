// See pieces.h.
#include "pieces.h"

#include "rounding.h"

namespace emulator {

namespace {

TensorMap read_map(Warp& w, uint64_t address, int lane) {
  alignas(8) uint8_t bytes[128];
  if (address % 64) Memory::misaligned("tensor map", address, 64, lane);
  for (int i = 0; i < 128; i += 8)
    std::memcpy(bytes + i, access_memory(w, Space::generic, address + i, 8, Access::read, lane, nullptr), 8);
  TensorMap map;
  std::memcpy(&map, bytes, sizeof map);
  if (map.magic != kTensorMapMagic) throw Fault("cp.async.bulk.tensor: no tensor map at " + hex(address), 1u << lane);
  return map;
}

// The box, dimension 0 fastest and without a stride of its own. The swizzle permutes chunks of 16 bytes; a row of the
// box is a multiple of that.
std::vector<Piece> pieces_of(const TensorMap& map, const int32_t* start, uint32_t shared, int lane) {
  if (shared % 128)
    throw Fault("misaligned: cp.async.bulk.tensor: shared address " + hex(shared) + " is no multiple of 128",
                1u << lane);
  std::vector<Piece> pieces;
  const int bytes = map.element_bytes, per_chunk = 16 / bytes;
  int64_t count[5], k[5] = {}, rows = 1;
  for (int i = 1; i < map.rank; ++i) {
    count[i] = (map.box[i] + map.step[i] - 1) / map.step[i];
    rows *= count[i];
  }
  uint32_t linear = shared;
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t global = map.address + static_cast<uint64_t>(int64_t{start[0]} * bytes);
    bool row_outside = false;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = start[i] + k[i] * map.step[i];
      row_outside |= at < 0 || at >= static_cast<int64_t>(map.size[i]);
      global += static_cast<uint64_t>(at) * map.stride[i - 1];
    }
    for (int first = 0; first < map.box[0]; first += per_chunk, linear += 16) {
      const uint32_t to = swizzle_address(linear, map.swizzle);
      for (int e = 0; e < per_chunk; ++e) {
        const int64_t at = int64_t{start[0]} + first + e;
        const bool outside = row_outside || at < 0 || at >= static_cast<int64_t>(map.size[0]);
        if (e && pieces.back().outside == outside)
          pieces.back().bytes += bytes;
        else
          pieces.push_back({to + static_cast<uint32_t>(e * bytes), global + (first + e) * bytes, bytes, outside});
      }
    }
    for (int i = 1; i < map.rank && ++k[i] == count[i]; ++i) k[i] = 0;
  }
  return pieces;
}

void check_linear(uint64_t shared, uint64_t global, int64_t bytes, int lane) {
  if (bytes % 16 || bytes <= 0)
    throw Fault("misaligned: cp.async.bulk of " + std::to_string(bytes) + " bytes, no multiple of 16", 1u << lane);
  Memory::check_alignment("shared", shared, 16, lane);
  Memory::check_alignment("global", global, 16, lane);
}

}  // namespace

Copy copy_of_lane(Warp& w, const Instruction& in, int lane) {
  const auto shared = static_cast<uint32_t>(lane_address(w, in.a, lane));
  const uint64_t other = lane_address(w, in.b, lane);
  Copy copy;
  if (!in.list.empty()) {
    int32_t start[5] = {};
    for (size_t i = 0; i < in.list.size(); ++i) start[i] = w.in<int32_t>(in.list[i])[lane];
    const TensorMap map = read_map(w, other, lane);
    if (map.rank != in.list.size())
      throw Fault("cp.async.bulk.tensor: the tensor map has rank " + std::to_string(map.rank), 1u << lane);
    copy.pieces = pieces_of(map, start, shared, lane);
    copy.element = kElementTypes[map.element];
    copy.fill_nan = map.fill_nan;
    copy.flush = map.flush;
    return copy;
  }
  const auto bytes = static_cast<int64_t>(w.lane_value(in.c, lane));
  check_linear(shared, other, bytes, lane);
  for (int64_t at = 0; at < bytes; at += 16)
    copy.pieces.push_back({shared + static_cast<uint32_t>(at), other + at, 16, false});
  return copy;
}

int64_t bytes_of_pieces(const std::vector<Piece>& pieces) {
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

void load_piece(const Copy& copy, const Piece& piece, const uint8_t* from, uint8_t (&to)[16]) {
  if (!piece.outside) {
    std::memcpy(to, from, piece.bytes);
    for (int i = 0; copy.flush && i < piece.bytes; i += 4) {
      float value;
      std::memcpy(&value, to + i, 4);
      value = flush(value);
      std::memcpy(to + i, &value, 4);
    }
    return;
  }
  const int element = bytes_of(copy.element);
  for (int i = 0; i < piece.bytes; ++i)  // the canonical NaN, little endian: ff ... ff 7f
    to[i] = !copy.fill_nan ? 0 : i % element == element - 1 ? 0x7f : 0xff;
}

void count_pieces(Warp& w, const std::vector<Piece>& pieces, Access access) {
  std::vector<Run> runs;
  for (const Piece& piece : pieces)
    if (!piece.outside) runs.push_back({piece.global, piece.bytes});
  count_runs(*w.block->counters, runs.data(), runs.size(), access);
  for (const Run& run : runs) w.block->counters->copied_bytes += run.bytes;
}

}  // namespace emulator
