// Bulk and tensor stores and reductions, and their groups: cp.async.bulk to global, cp.reduce.async.bulk, commit_group,
// wait_group.
//
// They read shared memory no later than wait_group.read and write global memory no later than wait_group.
#include "bulk.h"
#include "lanes.h"
#include "pieces.h"
#include "reductions.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

// What a reduction by a tensor map does with its elements: bits are bits of either sign.
Type reduced_type(int operation, Type element) {
  const int bytes = bytes_of(element);
  if (operation >= kAnd && operation <= kXor && is_integer(element) && bytes >= 4)
    return bytes == 8 ? Type::b64 : Type::b32;
  return operation == kAdd && element == Type::s64 ? Type::u64 : element;
}

// value: [0] reduction, -1: none; [1] Type of its elements, none: the tensor map says
void run_store(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int operation = static_cast<int>(in.value[0]);
  each_lane(w.mask, [&](int lane) {
    const Copy copy = copy_of_lane(w, in, lane);
    auto pieces = std::make_shared<std::vector<Piece>>(copy.pieces);
    std::erase_if(*pieces, [](const Piece& piece) { return piece.outside; });
    Type element = static_cast<Type>(in.value[1]);
    if (operation >= 0 && element == Type::none) {
      element = reduced_type(operation, copy.element);
      if (!has_wide_reduction(operation, element))
        throw Fault("cp.reduce.async.bulk.tensor: no ." + std::string(kReductionNames[operation]) + " of " +
                        std::string(facts(copy.element).name),
                    1u << lane);
    }
    for (const Piece& piece : *pieces) {
      block.shared.async_read(w.index, piece.shared, piece.bytes);
      block.launch->memory.at(piece.global, piece.bytes, true, lane);
      if (block.launch->check_races)
        block.launch->shadow.begin_async_write(block, w.index, lane, piece.global, piece.bytes, operation >= 0);
    }
    count_pieces(w, *pieces, Access::write);
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
      const auto lock = operation >= 0 ? launch.strong_access() : std::unique_lock<std::mutex>();
      const uint8_t* from = held->data();
      for (const Piece& piece : *pieces) {
        uint8_t* to = launch.memory.at(piece.global, piece.bytes, true, lane);
        if (operation < 0)
          std::memcpy(to, from, piece.bytes);
        else
          for (int i = 0; i < piece.bytes; i += bytes_of(element))
            reduce_of(element)(operation, to + i, from + i, nullptr);
        from += piece.bytes;
      }
    };
    block.changed();
    auto end = [&block, pieces, actor, lane, operation] {  // what wait_group promises
      block.changed();
      if (!block.launch->check_races) return;
      for (const Piece& piece : *pieces)
        block.launch->shadow.end_async_write(block, actor, lane, piece.global, piece.bytes, operation >= 0);
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

// value: [0] groups that may be pending, [1] only their reads
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

}  // namespace

void finish_bulk(Warp& w) {
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

void bulk_commit(Decoder& s) { s.in.execute = run_commit; }

void bulk_wait(Decoder& s) {
  s.in.value[1] = s.take("read");
  s.in.value[0] = s.immediate(0);
  s.in.execute = run_wait;
}

void bulk_store(Decoder& s, int rank) {
  s.take("tile");
  s.need("bulk_group");
  const bool policy = s.take("L2::cache_hint");
  s.in.value[0] = -1;
  s.in.b = bulk_far_side(s, 0, rank);
  s.in.a = s.address(1);
  if (!rank) s.in.c = s.source(2, Type::b32);
  if (policy) s.source(rank ? 2 : 3, Type::b64);
  s.in.execute = run_store;
}

void bulk_reduce(Decoder& s) {
  s.need("async");
  s.need("bulk");
  const int rank = bulk_rank(s);
  s.need("global");
  s.need("shared::cta");
  const int operation = take_reduction(s);
  Type element = Type::none;
  if (!rank) {
    const bool noftz = s.take("noftz");
    element = s.type();
    const bool half = facts(element).family == 'h';
    if (!has_wide_reduction(operation, element) || bytes_of(element) < 2 || facts(element).family == 'x')
      s.unknown("no such combination of operation and type");
    if (half && operation == kAdd && !noftz) s.unknown(".noftz expected");
  }
  bulk_store(s, rank);
  s.in.value[0] = operation;
  s.in.value[1] = static_cast<int64_t>(element);
}

}  // namespace emulator
