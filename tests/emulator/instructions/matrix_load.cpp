// 8 x 8 matrices of 16-bit elements between shared memory and registers: ldmatrix stmatrix movmatrix.
//
// Lane 4g+t holds elements (g, 2t) and (g, 2t+1) of a matrix, transposed (2t, g) and (2t+1, g). Lanes 8i to 8i+7 give
// the addresses of the rows of matrix i.
#include "access.h"
#include "families.h"

namespace emulator {

namespace {

void need_all_lanes(Warp& w, const char* name) {
  if (w.mask != kAll)
    throw Fault(std::string(name) + ": collective with missing lanes: all 32 must take part", ~w.mask);
}

struct Tile {
  uint16_t at[8][8];
};

void spread(Warp& w, const Operand& d, const Tile& tile, bool transposed) {
  uint32_t* to = w.out<uint32_t>(d);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const uint32_t low = transposed ? tile.at[2 * t][g] : tile.at[g][2 * t];
    const uint32_t high = transposed ? tile.at[2 * t + 1][g] : tile.at[g][2 * t + 1];
    to[lane] = high << 16 | low;
  }
}

Tile collect(Warp& w, const Operand& a, bool transposed) {
  Tile tile;
  const uint32_t* from = w.in<uint32_t>(a);
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    (transposed ? tile.at[2 * t][g] : tile.at[g][2 * t]) = static_cast<uint16_t>(from[lane]);
    (transposed ? tile.at[2 * t + 1][g] : tile.at[g][2 * t + 1]) = static_cast<uint16_t>(from[lane] >> 16);
  }
  return tile;
}

template <bool kLoad>
void run(Warp& w, const Instruction& in) {
  need_all_lanes(w, kLoad ? "ldmatrix" : "stmatrix");
  Tile tiles[4];
  Traffic traffic;
  StoreCheck check;
  const int count = static_cast<int>(in.list.size());
  if (!kLoad)
    for (int i = 0; i < count; ++i) tiles[i] = collect(w, in.list[i], in.value[0]);
  for (int lane = 0; lane < 8 * count; ++lane) {
    const Access access = kLoad ? Access::read : Access::write;
    uint8_t* row = access_memory(w, in.space, lane_address(w, in.a, lane), 16, access, lane, &traffic);
    if (!kLoad) check.add(row, lane, reinterpret_cast<const uint8_t*>(tiles[lane / 8].at[lane % 8]), 16);
    kLoad ? std::memcpy(tiles[lane / 8].at[lane % 8], row, 16) : std::memcpy(row, tiles[lane / 8].at[lane % 8], 16);
  }
  if (kLoad)
    for (int i = 0; i < count; ++i) spread(w, in.list[i], tiles[i], in.value[0]);
  traffic.finish(w, in, kLoad ? Access::read : Access::write);
}

void matrix(Decoder& s) {
  s.need("sync");
  s.need("aligned");
  s.need("m8n8");
  const std::string count = s.take_one({"x1", "x2", "x4"});
  s.in.value[0] = s.take("trans");
  s.in.space = s.take("shared") || s.take("shared::cta") ? Space::shared : Space::generic;
  s.need("b16");
  const bool load = s.opcode() == "ldmatrix";
  s.in.list = s.vector(load ? 0 : 1, Type::b32);
  s.in.list_is_written = load;
  s.in.a = s.address(load ? 1 : 0);
  if (count.empty() || static_cast<int>(s.in.list.size()) != count[1] - '0') s.unknown("unknown form");
  s.in.execute = load ? run<true> : run<false>;
}

}  // namespace

void matrix_load_instructions(Table& table) {
  table.add({"ldmatrix", "stmatrix"}, "", Class::memory, matrix);
  table.add({"movmatrix"}, "", Class::move, [](Decoder& s) {
    for (const char* word : {"sync", "aligned", "m8n8", "trans", "b16"}) s.need(word);
    s.in.d = s.out(0, Type::b32);
    s.in.a = s.source(1, Type::b32);
    s.in.execute = [](Warp& w, const Instruction& in) {
      need_all_lanes(w, "movmatrix");
      spread(w, in.d, collect(w, in.a, false), true);
    };
  });
}

}  // namespace emulator
