// A launch: limits of the architecture, addresses known now, blocks over host threads.
#include <algorithm>
#include <cstring>
#include <thread>

#include "async_copy.h"
#include "machine.h"

namespace emulator {

void Counters::resize(int instructions) {
  executions.resize(instructions);
  shared_transactions.resize(instructions);
  shared_ideal.resize(instructions);
}

void Counters::add(const Counters& other) {
  for (size_t i = 0; i < executions.size(); ++i) {
    executions[i] += other.executions[i];
    shared_transactions[i] += other.shared_transactions[i];
    shared_ideal[i] += other.shared_ideal[i];
  }
  global_read_bytes += other.global_read_bytes;
  global_read_sectors += other.global_read_sectors;
  global_read_ideal += other.global_read_ideal;
  global_write_bytes += other.global_write_bytes;
  global_write_sectors += other.global_write_sectors;
  global_write_ideal += other.global_write_ideal;
  matrix_flops += other.matrix_flops;
  barriers += other.barriers;
  copied_bytes += other.copied_bytes;
  printed += other.printed;
}

namespace {

int64_t shared_limit(int arch) {  // bytes that one block may have, static and dynamic together
  switch (arch) {
    case 80:
    case 87:
      return 163 * 1024;
    case 75:
      return 64 * 1024;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99 * 1024;
    default:
      return arch >= 90 ? 227 * 1024 : 96 * 1024;
  }
}

}  // namespace

void Launch::check_limits() const {
  const int64_t threads_per_block = int64_t{block[0]} * block[1] * block[2];
  if (threads_per_block < 1 || threads_per_block > 1024) throw Fault("a block has 1 to 1024 threads");
  if (block[2] > 64) throw Fault("a block has at most 64 threads in z");
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535) throw Fault("grid out of bounds");
  if (kernel->max_threads && threads_per_block > kernel->max_threads)
    throw Fault("a block of " + std::to_string(threads_per_block) + " threads; the kernel allows " +
                std::to_string(kernel->max_threads));
  if (kernel->shared_bytes > 48 * 1024)
    throw Fault("shared memory out of bounds: more than 48 KiB of static shared memory");
  const int64_t limit = shared_limit(program->arch);
  if (static_shared + dynamic_shared > limit)
    throw Fault("shared memory out of bounds: " + std::to_string(static_shared + dynamic_shared) + " bytes, " +
                program->target + " allows " + std::to_string(limit));
}

void Launch::relocate() {
  for (const auto& function : program->functions)
    for (const Relocation& one : function->relocations)
      for (int lane = 0; lane < 32; ++lane) {
        const uint64_t address = shared_base + one.addend + (one.dynamic ? static_shared : 0);
        std::memcpy(function->constants.data() + one.offset + lane * one.bytes, &address, one.bytes);
      }
}

namespace {

[[noreturn]] void deadlock(const std::vector<const Block*>& blocks) {
  std::string text = "deadlock: no warp can go on";
  for (const Block* one : blocks) {
    one->check_registers();
    text += one->where();
  }
  throw std::runtime_error(text);
}

std::vector<const Block*> pointers(const std::vector<std::unique_ptr<Block>>& blocks) {
  std::vector<const Block*> found;
  for (const auto& one : blocks) found.push_back(one.get());
  return found;
}

}  // namespace

uint64_t Launch::changes() const {
  uint64_t sum = 0;
  for (const Progress& one : progress_) sum += one.changes.load(std::memory_order_relaxed);
  return sum;
}

bool Launch::all_stuck(int thread, uint64_t watch) {
  progress_[thread].stuck = watch;
  return std::all_of(progress_.begin(), progress_.end(),
                     [&](const Progress& one) {
                       const uint64_t stuck = one.stuck;
                       return stuck == watch || stuck == kFinished;
                     }) &&
         changes() + 1 == watch;
}

void Launch::work(int thread, std::atomic<int64_t>& next, Counters& own, std::atomic<bool>& failed) {
  const int64_t blocks = int64_t{grid[0]} * grid[1] * grid[2];
  std::vector<std::unique_ptr<Block>> resident;
  size_t wanted = schedule == Schedule::in_order ? 1 : 3;
  std::mt19937_64 random(seed);
  uint64_t before = executed, quiet_since = executed, seen = 0;
  for (size_t turn = 0; !failed; ++turn) {
    while (resident.size() < wanted) {
      const int64_t number = next++;
      if (number >= blocks) break;
      auto made = std::make_unique<Block>();
      made->counters = &own;
      made->progress = &progress_[thread];
      made->start(*this, number);
      resident.push_back(std::move(made));
    }
    if (resident.empty()) break;
    const size_t chosen = (schedule == Schedule::random ? random() : turn) % resident.size();
    Block& one = *resident[chosen];
    if (const uint64_t now = changes(); now != seen) {
      seen = now;
      quiet_since = executed;
    }
    one.watch = executed - quiet_since > kQuiet ? seen + 1 : 0;
    if (!one.step() && !one.done()) deadlock({&one});
    if (one.done()) {
      while (!one.flights.empty()) land_one(one, 0);
      for (const auto& warp : one.warps) finish_bulk(*warp);
      one.changed();
      resident.erase(resident.begin() + static_cast<long>(chosen));
      before = executed;
    } else if (executed - before > (wanted << 20)) {  // it may wait for a block that has not started
      ++wanted;
    } else if (one.watch && std::all_of(resident.begin(), resident.end(),
                                        [](const auto& block) { return block->flights.empty() && block->stuck(); })) {
      if (next < blocks)
        ++wanted;
      else if (all_stuck(thread, one.watch))
        deadlock(pointers(resident));
    }
    if (limit && executed > limit)
      throw std::runtime_error("deadlock: still running after " + std::to_string(limit) + " warp instructions" +
                               one.where());
  }
  progress_[thread].stuck = kFinished;
}

void Launch::run() {
  static_shared = align_up(kernel->shared_bytes, dynamic_shared || kernel->shared_bytes ? 16 : 1);
  // Bases differ by seed, so that no kernel relies on where shared memory starts. Copies need 1024-aligned tiles.
  shared_base = 1024 * (1 + static_cast<uint32_t>(seed % 4));
  if (dynamic_shared) static_shared = align_up(kernel->shared_bytes, program->arch >= 90 ? 1024 : 16);
  check_limits();
  relocate();
  if (check_races) {
    if (int64_t{grid[0]} * grid[1] * grid[2] > kMostBlocks) throw Fault("grid too large for check_races");
    shadow.start(*this);
  }
  counters.resize(program->instructions);
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::string error;
  std::mutex error_lock;
  std::vector<Counters> parts(threads);
  progress_ = std::vector<Progress>(threads);
  auto body = [&](int t) {
    parts[t].resize(program->instructions);
    try {
      work(t, next, parts[t], failed);
    } catch (const std::exception& thrown) {
      std::lock_guard<std::mutex> lock(error_lock);
      if (!failed) error = thrown.what();
      failed = true;
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(body, t);
  body(0);
  for (std::thread& helper : helpers) helper.join();
  for (const Counters& part : parts) counters.add(part);
  if (failed) throw std::runtime_error(error);
}

}  // namespace emulator
