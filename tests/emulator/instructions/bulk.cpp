// Bulk and tensor copies: cp.async.bulk, cp.async.bulk.tensor, cp.reduce.async.bulk, their groups and prefetches.
//
// Loads land when the engine chooses (early, random, or when nobody else can run) and then complete bytes of their
// mbarrier. Stores read shared memory no later than wait_group.read and write global memory no later than wait_group.
#include "access.h"
#include "families.h"
#include "hopper.h"
#include "pieces.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

void check_linear(uint64_t shared, uint64_t global, int64_t bytes, int lane) {
  if (bytes % 16 || bytes <= 0)
    throw Fault("misaligned: cp.async.bulk of " + std::to_string(bytes) + " bytes, no multiple of 16", 1u << lane);
  Memory::check_alignment("shared", shared, 16, lane);
  Memory::check_alignment("global", global, 16, lane);
}

// The pieces that one lane's instruction copies; operand positions depend on the direction.
std::vector<Piece> pieces_of_lane(Warp& w, const Instruction& in, int lane) {
  const auto shared = static_cast<uint32_t>(lane_address(w, in.a, lane));
  const uint64_t other = lane_address(w, in.b, lane);
  if (!in.list.empty()) {
    int32_t start[5] = {};
    for (size_t i = 0; i < in.list.size(); ++i) start[i] = w.in<int32_t>(in.list[i])[lane];
    const TensorMap map = read_map(w, other, lane);
    if (map.rank != in.list.size())
      throw Fault("cp.async.bulk.tensor: the tensor map has rank " + std::to_string(map.rank), 1u << lane);
    return pieces_of(map, start, shared);
  }
  const auto bytes = static_cast<int64_t>(w.lane_value(in.c, lane));
  check_linear(shared, other, bytes, lane);
  std::vector<Piece> pieces;
  for (int64_t at = 0; at < bytes; at += 16)
    pieces.push_back({shared + static_cast<uint32_t>(at), other + at, 16, false});
  return pieces;
}

void run_load(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  each_lane(w.mask, [&](int lane) {
    const auto barrier = static_cast<uint32_t>(lane_address(w, in.e, lane));
    block.shared.read(w.index, barrier, 8, lane);
    find_mbarrier(block, barrier);
    auto pieces = pieces_of_lane(w, in, lane);
    for (const Piece& piece : pieces) {
      if (!piece.outside) {
        block.launch->memory.at(piece.global, piece.bytes, false, lane);
        if (block.launch->check_races) block.launch->shadow.async_read(block, w.index, lane, piece.global, piece.bytes);
        block.counters->copied_bytes += piece.bytes;
      }
      block.shared.begin_copy(w.index, piece.shared, piece.bytes, Pending::bulk, lane);
      block.shared.poison(piece.shared, piece.bytes);
    }
    auto land = [&block, pieces, barrier, lane] {
      const int actor = block.copy_actor();
      static constexpr uint8_t zeros[16] = {};
      for (const Piece& piece : pieces)
        block.shared.land(actor, piece.shared, piece.bytes,
                          piece.outside ? zeros : block.launch->memory.at(piece.global, piece.bytes, false, lane));
      complete_transactions(block, barrier, bytes_of_pieces(pieces));
      block.clocks.tick(actor);
    };
    const Copies when = block.launch->copies;
    if (when == Copies::early || (when == Copies::random && block.random() % 4 == 0))
      land();
    else
      block.flights.push_back({land});
  });
}

// value: [0] reduction, [1] element kind, -1: the tensor map says
void run_store(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  each_lane(w.mask, [&](int lane) {
    auto pieces = std::make_shared<std::vector<Piece>>(pieces_of_lane(w, in, lane));
    int element = static_cast<int>(in.value[1]);
    if (element < 0) element = read_map(w, lane_address(w, in.b, lane), lane).kind;
    std::erase_if(*pieces, [](const Piece& piece) { return piece.outside; });
    const int operation = static_cast<int>(in.value[0]);
    for (const Piece& piece : *pieces) {
      block.shared.async_read(w.index, piece.shared, piece.bytes);
      block.launch->memory.at(piece.global, piece.bytes, true, lane);
      if (block.launch->check_races)
        block.launch->shadow.begin_async_write(block, w.index, lane, piece.global, piece.bytes, operation);
      block.counters->copied_bytes += piece.bytes;
    }
    auto held = std::make_shared<std::vector<uint8_t>>();
    const int actor = w.index;
    for (const Piece& piece : *pieces) block.shared.hold(piece.shared, piece.bytes, 1);
    auto read = [&block, pieces, held, actor] {
      for (const Piece& piece : *pieces) {
        const uint8_t* from = block.shared.async_read(actor, piece.shared, piece.bytes);
        held->insert(held->end(), from, from + piece.bytes);
      }
    };
    auto finish = [&block, pieces, held, read] {  // what wait_group.read promises: read, and writable again
      if (held->empty()) read();
      for (const Piece& piece : *pieces) block.shared.hold(piece.shared, piece.bytes, -1);
    };
    auto write = [&block, pieces, held, operation, element, lane] {
      Launch& launch = *block.launch;
      const auto lock = operation ? launch.strong_access() : std::unique_lock<std::mutex>();
      size_t at = 0;
      for (const Piece& piece : *pieces) {
        uint8_t* to = launch.memory.at(piece.global, piece.bytes, true, lane);
        operation ? reduce(operation, element, to, held->data() + at, piece.bytes)
                  : (void)std::memcpy(to, held->data() + at, piece.bytes);
        at += piece.bytes;
      }
    };
    block.changed();
    auto end = [&block, pieces, actor, lane, operation] {  // what wait_group promises
      block.changed();
      if (!block.launch->check_races) return;
      for (const Piece& piece : *pieces)
        block.launch->shadow.end_async_write(block, actor, lane, piece.global, piece.bytes, operation);
    };
    const Copies when = block.launch->copies;
    BulkGroup& group = w.async->bulk_open[lane];
    if (when == Copies::early || (when == Copies::random && block.random() % 2)) {
      read();
      if (when == Copies::early || block.random() % 2) {
        write();
        group.reads.push_back(finish);
        group.writes.push_back(end);
        return;
      }
    }
    group.reads.push_back(finish);
    group.writes.push_back(write);
    group.writes.push_back(end);
  });
}

void run_commit(Warp& w, const Instruction&) {
  each_lane(w.mask, [&](int lane) {
    w.async->bulk_groups[lane].push_back(std::move(w.async->bulk_open[lane]));
    w.async->bulk_open[lane] = {};
  });
}

void run_wait(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    auto& groups = w.async->bulk_groups[lane];
    const int64_t done = static_cast<int64_t>(groups.size()) - in.value[0];
    for (int64_t i = 0; i < done; ++i) {
      for (auto& read : groups[i].reads) read();
      groups[i].reads.clear();
      if (in.value[1]) continue;
      for (auto& write : groups[i].writes) write();
      groups[i].writes.clear();
    }
    while (!in.value[1] && static_cast<int64_t>(groups.size()) > in.value[0]) groups.pop_front();
  });
}

// [map, {x, y}] and [address]
Operand far_side(Decoder& s, int i, bool tensor) {
  if (tensor) {
    const auto& items = s.address_items(i);
    if (items.size() != 1) s.unknown("coordinates expected");
    for (const Expression& item : items[0].items) s.in.list.push_back(s.item(item, Type::b32));
  }
  return s.address(i);
}

void store(Decoder& s, bool tensor) {
  s.take("tile");
  s.need("bulk_group");
  const bool policy = s.take("L2::cache_hint");
  s.in.b = far_side(s, 0, tensor);
  s.in.a = s.address(1);
  if (!tensor) s.in.c = s.source(2, Type::b32);
  if (policy) s.source(tensor ? 2 : 3, Type::b64);
  s.in.execute = run_store;
}

void take_tensor(Decoder& s) { s.take_one({"1d", "2d", "3d", "4d", "5d"}); }

}  // namespace

void finish_bulk(Warp& w) {  // when the block ends
  for (int lane = 0; lane < 32; ++lane) {
    auto& groups = w.async->bulk_groups[lane];
    groups.push_back(std::move(w.async->bulk_open[lane]));
    for (BulkGroup& group : groups) {
      for (auto& read : group.reads) read();
      for (auto& write : group.writes) write();
    }
    groups.clear();
  }
}

void bulk(Decoder& s) {
  if (s.take("commit_group")) {
    s.in.execute = run_commit;
    return;
  }
  if (s.take("wait_group")) {
    s.in.value[1] = s.take("read");
    s.in.value[0] = s.immediate(0);
    s.in.execute = run_wait;
    return;
  }
  if (s.take("prefetch")) {
    while (!s.take_first().empty()) {
    }
    for (int i = 0; i < s.count(); ++i) s.expression(i);
    s.in.execute = [](Warp&, const Instruction&) {};
    return;
  }
  const bool tensor = s.take("tensor");
  take_tensor(s);
  const std::string first = s.take_first();
  s.in.value[1] = tensor ? -1 : kF32;
  if (first == "global") {
    s.need("shared::cta");
    return store(s, tensor);
  }
  if (first != "shared::cluster" && first != "shared::cta") s.unknown("unknown direction");
  s.need("global");
  s.take("tile");
  s.need("mbarrier::complete_tx::bytes");
  const bool multicast = s.take("multicast::cluster"), policy = s.take("L2::cache_hint");
  s.in.a = s.address(0);
  s.in.b = far_side(s, 1, tensor);
  int at = 2;
  if (!tensor) s.in.c = s.source(at++, Type::b32);
  s.in.e = s.address(at++);
  if (multicast) s.source(at++, Type::b16);  // to a cluster of one
  if (policy) s.source(at++, Type::b64);
  s.in.execute = run_load;
}

void bulk_reduce(Decoder& s) {
  s.need("async");
  s.need("bulk");
  const bool tensor = s.take("tensor");
  take_tensor(s);
  s.need("global");
  s.need("shared::cta");
  constexpr std::string_view names[] = {"", "add", "min", "max", "and", "or", "xor"};
  for (int k = 1; k < 7; ++k)
    if (s.take(names[k])) s.in.value[0] = k;
  if (!s.in.value[0]) s.unknown("unknown operation");
  s.in.value[1] = -1;
  if (!tensor) {
    s.take("noftz");
    for (int k = 0; k < 8; ++k)
      if (s.take(kElementNames[k])) s.in.value[1] = k;
    if (s.in.value[1] < 0) s.unknown("unknown type");
  }
  store(s, tensor);
}

}  // namespace emulator
