// See global_shadow.h.
#include "global_shadow.h"

#include "machine.h"

namespace emulator {

namespace {

constexpr int kPageBytes = 4096;
constexpr uint64_t kFirstAddress = 1 << 20;  // of every window

Moment moment(const Block& block, int actor, int lane, bool async, bool strong) {
  return {block.clocks.now(actor),
          static_cast<uint64_t>(actor),
          static_cast<uint64_t>(lane),
          async,
          strong,
          static_cast<uint64_t>(block.number + 1)};
}
bool same_warp(Moment x, Moment y) { return x.block == y.block && x.actor == y.actor; }
bool heard(Block& block, Moment now, Moment other) { return block.order.heard(static_cast<int>(now.actor), other); }

}  // namespace

void GlobalShadow::start(const Launch& launch) {
  launch_ = &launch;
  for (const Allocation& one : launch.memory.windows()) {
    // What may not be written needs no shadow.
    const uint64_t start = (one.address & ((uint64_t{1} << kWindowShift) - 1)) - kFirstAddress;
    windows_.emplace_back(one.data && !one.read_only ? (start + one.bytes) / kPageBytes + 1 : 0);
  }
}

void GlobalShadow::Page::refine(int to) {
  const int factor = granule / to;
  std::vector<Cell> finer(cells.size() * factor);
  for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells[i / factor];
  cells.swap(finer);
  granule = to;
}

template <class F>
void GlobalShadow::each_cell(Access& access, int bytes, F f) {
  auto& pages = windows_[access.address >> kWindowShift];
  if (pages.empty()) return;
  const uint64_t first = (access.address >> kWindowShift << kWindowShift) + kFirstAddress;
  const int fits = static_cast<int>((access.address | static_cast<uint64_t>(bytes) | 16) &
                                    -(access.address | static_cast<uint64_t>(bytes) | 16));
  for (const uint64_t end = access.address + bytes; access.address < end;) {
    const uint64_t number = (access.address - first) / kPageBytes, page_at = first + number * kPageBytes;
    std::unique_lock<std::mutex> lock(locks_[number % locks_.size()], std::defer_lock);
    if (launch_->threads > 1) lock.lock();
    if (!pages[number]) {
      pages[number] = std::make_unique<Page>();
      pages[number]->cells.resize(kPageBytes / 16);
    }
    Page& page = *pages[number];
    if (page.granule > fits) page.refine(fits);
    for (const uint64_t stop = std::min(end, page_at + kPageBytes); access.address < stop;
         access.address += page.granule)
      f(page.cells[(access.address - page_at) / page.granule]);
  }
}

std::string GlobalShadow::name(const Access& access, Moment moment) const {
  std::string text =
      moment.async ? "an asynchronous copy" : "warp " + std::to_string(static_cast<unsigned>(moment.actor));
  if (moment.block == access.now.block) return text;
  const uint64_t number = moment.block - 1, columns = launch_->grid[0], rows = launch_->grid[1];
  return text + " of block (" + std::to_string(number % columns) + ", " + std::to_string(number / columns % rows) +
         ", " + std::to_string(number / columns / rows) + ")";
}

void GlobalShadow::race(const Access& access, const char* what, Moment other) const {
  throw Fault("data race: " + name(access, access.now) + " " + what + " of " + name(access, other) + " without " +
                  (other.block == access.now.block ? "a barrier" : "a fence and an atomic") +
                  " between them, at global memory " + launch_->memory.place(access.address),
              1u << access.now.lane);
}

void GlobalShadow::check_lanes(const Access& access, Moment write) const {
  if (!same_warp(write, access.now) || write.lane == access.now.lane || write.strong || write.async) return;
  if (access.block.clocks.met_since(static_cast<int>(access.now.actor), static_cast<int>(access.now.lane),
                                    static_cast<uint32_t>(write.time)))
    return;
  throw Fault("data race: lane " + std::to_string(static_cast<unsigned>(access.now.lane)) + " reads what lane " +
                  std::to_string(static_cast<unsigned>(write.lane)) +
                  " of its warp wrote without a __syncwarp between them, at global memory " +
                  launch_->memory.place(access.address),
              1u << access.now.lane);
}

void GlobalShadow::check_proxy(const Access& access, Moment write) const {
  if (write.async || access.block.order.proxied(static_cast<int>(access.now.actor), write)) return;
  throw Fault("async proxy: accesses a generic write of " + name(access, write) +
                  " that no fence.proxy.async follows, at global memory " + launch_->memory.place(access.address),
              1u << access.now.lane);
}

// A read that this one has heard of need not be remembered: who is ordered behind this one is behind that one too.
void GlobalShadow::remember_read(const Access& access, Cell& cell, Moment read) const {
  for (Moment& slot : cell.reads) {
    if (slot.block && !same_warp(slot, read) && !heard(access.block, access.now, slot)) continue;
    slot = read;
    return;
  }
  cell.reads[1] = read;
}

void GlobalShadow::overwrite(const Access& access, Cell& cell, Moment write) const {
  if (cell.write.block && !(cell.write.strong && write.strong) && !heard(access.block, access.now, cell.write))
    race(access, "overwrites a write", cell.write);
  for (Moment& read : cell.reads) {
    if (!read.block) continue;
    if (heard(access.block, access.now, read))
      read = {};
    else if (!write.strong)
      race(access, "overwrites what is a read", read);
  }
  cell.write = write;
}

void GlobalShadow::read(Block& block, int actor, int lane, uint64_t address, int bytes, bool strong) {
  Access access{block, moment(block, actor, lane, false, strong), address};
  each_cell(access, bytes, [&](Cell& cell) {
    if (cell.write.block && !cell.write.strong) {
      if (!heard(block, access.now, cell.write)) race(access, "reads what is a write", cell.write);
      if (!strong) check_lanes(access, cell.write);
    }
    remember_read(access, cell, access.now);
  });
}

void GlobalShadow::write(Block& block, int actor, int lane, uint64_t address, int bytes, bool strong) {
  Access access{block, moment(block, actor, lane, false, strong), address};
  each_cell(access, bytes, [&](Cell& cell) { overwrite(access, cell, access.now); });
  block.clocks.wrote(actor);
}

void GlobalShadow::async_read(Block& block, int actor, int lane, uint64_t address, int bytes) {
  Access access{block, moment(block, actor, lane, false, false), address};
  const Moment read = moment(block, block.copy_actor(), lane, true, false);
  each_cell(access, bytes, [&](Cell& cell) {
    if (cell.write.block) {
      if (heard(block, access.now, cell.write))
        check_proxy(access, cell.write);
      else if (!cell.write.strong)
        race(access, "reads what is a write", cell.write);
    }
    remember_read(access, cell, read);
  });
}

void GlobalShadow::begin_async_write(Block& block, int actor, int lane, uint64_t address, int bytes, bool reduces) {
  Access access{block, moment(block, actor, lane, false, reduces), address};
  Moment pending = moment(block, block.copy_actor(), lane, true, reduces);
  pending.time = 0xffffff;  // a time of which nobody hears
  each_cell(access, bytes, [&](Cell& cell) {
    if (reduces && cell.write.block && heard(block, access.now, cell.write)) check_proxy(access, cell.write);
    overwrite(access, cell, pending);
  });
}

void GlobalShadow::end_async_write(Block& block, int actor, int lane, uint64_t address, int bytes, bool reduces) {
  Access access{block, moment(block, actor, lane, true, reduces), address};
  each_cell(access, bytes, [&](Cell& cell) { cell.write = access.now; });
}

}  // namespace emulator
