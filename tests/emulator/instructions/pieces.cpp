// See pieces.h.
#include "pieces.h"

#include "access.h"
#include "rounding.h"

namespace emulator {

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

// Elements of a box one by one, dimension 0 fastest; runs of 16 bytes at most, since the swizzle permutes those.
std::vector<Piece> pieces_of(const TensorMap& map, const int32_t* start, uint32_t shared) {
  std::vector<Piece> pieces;
  int64_t count[5], k[5] = {}, total = 1;
  for (int i = 0; i < 5; ++i) {
    count[i] = i < map.rank ? (map.box[i] + map.step[i] - 1) / map.step[i] : 1;
    total *= count[i];
  }
  if (shared % 128)
    throw Fault("misaligned: cp.async.bulk.tensor: shared address " + hex(shared) + " is no multiple of 128");
  const int bytes = map.element_bytes;
  for (int64_t n = 0; n < total; ++n) {
    uint64_t global = map.address;
    bool outside = false;
    for (int i = 0; i < map.rank; ++i) {
      const int64_t at = start[i] + k[i] * map.step[i];
      outside |= at < 0 || at >= static_cast<int64_t>(map.size[i]);
      global += static_cast<uint64_t>(at) * (i ? map.stride[i - 1] : bytes);
    }
    const uint32_t linear = shared + static_cast<uint32_t>(n * bytes), to = swizzle_address(linear, map.swizzle);
    Piece* last = pieces.empty() ? nullptr : &pieces.back();
    if (last && linear % 16 && last->outside == outside && last->shared + last->bytes == to &&
        (outside || last->global + last->bytes == global))
      last->bytes += bytes;
    else
      pieces.push_back({to, global, bytes, outside});
    for (int i = 0; i < 5 && ++k[i] == count[i]; ++i) k[i] = 0;
  }
  return pieces;
}

int64_t bytes_of_pieces(const std::vector<Piece>& pieces) {
  int64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

namespace {

template <class T>
void reduce_as(int operation, uint8_t* at, const uint8_t* from, int bytes) {
  for (int i = 0; i < bytes; i += sizeof(T)) {
    T old, add;
    std::memcpy(&old, at + i, sizeof(T));
    std::memcpy(&add, from + i, sizeof(T));
    switch (operation) {
      case kAdd:
        old = static_cast<T>(old + add);
        break;
      case kMin:
        old = std::min(old, add);
        break;
      case kMax:
        old = std::max(old, add);
        break;
      default:
        if constexpr (std::is_integral_v<T>)
          old = operation == kAnd ? old & add : operation == kOr ? old | add : old ^ add;
    }
    std::memcpy(at + i, &old, sizeof(T));
  }
}

}  // namespace

void reduce(int operation, int element, uint8_t* at, const uint8_t* from, int bytes) {
  switch (element) {
    case kF32:
      return reduce_as<float>(operation, at, from, bytes);
    case kF64:
      return reduce_as<double>(operation, at, from, bytes);
    case kU32:
      return reduce_as<uint32_t>(operation, at, from, bytes);
    case kS32:
      return reduce_as<int32_t>(operation, at, from, bytes);
    case kU64:
      return reduce_as<uint64_t>(operation, at, from, bytes);
    case kS64:
      return reduce_as<int64_t>(operation, at, from, bytes);
    default:
      break;
  }
  const Format format = element == kF16 ? kHalf : kBfloat;
  for (int i = 0; i < bytes; i += 2) {
    uint16_t old, add;
    std::memcpy(&old, at + i, 2);
    std::memcpy(&add, from + i, 2);
    const double x = decode_number(old, format), y = decode_number(add, format);
    old = static_cast<uint16_t>(encode(operation == kAdd   ? odd_sum(x, y)
                                       : operation == kMin ? std::fmin(x, y)
                                                           : std::fmax(x, y),
                                       format, Round::nearest));
    std::memcpy(at + i, &old, 2);
  }
}

}  // namespace emulator
