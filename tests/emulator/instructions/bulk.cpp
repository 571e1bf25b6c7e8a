// Bulk and tensor loads: cp.async.bulk and cp.async.bulk.tensor to shared memory, and prefetches; stores and groups are
// in bulk_store.cpp.
//
// Loads land when the engine chooses (early, random, or when a warp waits for their mbarrier and nobody else can run)
// and then complete bytes of their mbarrier.
#include "bulk.h"
#include "families.h"
#include "hopper.h"
#include "pieces.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

void run_load(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  each_lane(w.mask, [&](int lane) {
    const auto barrier = static_cast<uint32_t>(lane_address(w, in.e, lane));
    block.shared.read(w.index, barrier, 8, lane);
    find_mbarrier(block, barrier);
    const Copy copy = copy_of_lane(w, in, lane);
    for (const Piece& piece : copy.pieces) {
      if (!piece.outside) {
        block.launch->memory.at(piece.global, piece.bytes, false, lane);
        if (block.launch->check_races) block.launch->shadow.async_read(block, w.index, lane, piece.global, piece.bytes);
      }
      block.shared.begin_copy(w.index, piece.shared, piece.bytes, Pending::bulk, lane);
      block.shared.poison(piece.shared, piece.bytes);
    }
    count_pieces(w, copy.pieces, Access::read);
    auto land = [&block, copy, barrier, lane] {
      const int actor = block.copy_actor();
      uint8_t bytes[16];
      for (const Piece& piece : copy.pieces) {
        load_piece(copy, piece,
                   piece.outside ? nullptr : block.launch->memory.at(piece.global, piece.bytes, false, lane), bytes);
        block.shared.land(actor, piece.shared, piece.bytes, bytes);
      }
      complete_transactions(block, barrier, bytes_of_pieces(copy.pieces));
      block.clocks.tick(actor);
    };
    const Copies when = block.launch->copies;
    if (when == Copies::early || (when == Copies::random && block.random() % 4 == 0))
      land();
    else
      block.flights.push_back({land, barrier});
  });
}

}  // namespace

Operand bulk_far_side(Decoder& s, int i, int rank) {
  if (rank) {
    const auto& items = s.address_items(i);
    if (items.size() != 1) s.unknown("coordinates expected");
    for (const Expression& item : items[0].items) s.in.list.push_back(s.item(item, Type::b32));
    if (s.in.list.size() != static_cast<size_t>(rank)) s.unknown("as many coordinates as dimensions expected");
  }
  return s.address(i);
}

int bulk_rank(Decoder& s) {
  if (!s.take("tensor")) return 0;
  const std::string rank = s.take_one({"1d", "2d", "3d", "4d", "5d"});
  if (rank.empty()) s.unknown(".1d to .5d expected");
  return rank[0] - '0';
}

void bulk(Decoder& s) {
  if (s.take("commit_group")) return bulk_commit(s);
  if (s.take("wait_group")) return bulk_wait(s);
  if (s.take("prefetch")) {
    while (!s.take_first().empty()) {
    }
    for (int i = 0; i < s.count(); ++i) s.expression(i);
    s.in.execute = [](Warp&, const Instruction&) {};
    return;
  }
  const int rank = bulk_rank(s);
  const std::string first = s.take_first();
  if (first == "global") {
    s.need("shared::cta");
    return bulk_store(s, rank);
  }
  if (first != "shared::cluster" && first != "shared::cta") s.unknown("unknown direction");
  s.need("global");
  s.take("tile");
  s.need("mbarrier::complete_tx::bytes");
  const bool multicast = s.take("multicast::cluster"), policy = s.take("L2::cache_hint");
  s.in.a = s.address(0);
  s.in.b = bulk_far_side(s, 1, rank);
  int at = 2;
  if (!rank) s.in.c = s.source(at++, Type::b32);
  s.in.e = s.address(at++);
  if (multicast) s.source(at++, Type::b16);  // to a cluster of one
  if (policy) s.source(at++, Type::b64);
  s.in.execute = run_load;
}

}  // namespace emulator
