// The machine that runs a program: warps of 32 lanes, blocks of warps, and the launch that schedules blocks.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

#include "global_shadow.h"
#include "mbarrier.h"
#include "memory.h"
#include "program.h"
#include "shared.h"
#include "watch.h"

namespace emulator {

constexpr uint32_t kAll = 0xffffffff;

struct Block;
struct Launch;
struct Counters;

struct Frame;

// Where lanes that diverged wait for each other: at an instruction, or at the return of a call (pc kReturn).
struct Join {
  int pc = 0;
  uint32_t expected = 0, arrived = 0;
  int parent = -1;
  std::shared_ptr<Frame> frame;
};
constexpr int kReturn = -2;

// One call of a function: its registers and parameters.
struct Frame {
  const Function* function = nullptr;
  std::shared_ptr<Frame> caller;
  const Instruction* call = nullptr;
  int return_pc = 0;
  int join = -1;  // the Join of the return; -1: the kernel itself
  int64_t local_base = 0;
  std::unique_ptr<uint8_t[]> storage;
  uint8_t* registers = nullptr;
  std::vector<uint8_t> params;  // of each lane in turn
  uint8_t* param(int lane) { return params.data() + lane * function->param_bytes; }
};
std::shared_ptr<Frame> make_frame(const Function& function);

// Lanes that are at the same place.
struct Split {
  int pc = 0;
  uint32_t active = 0;
  int join = -1;
  std::shared_ptr<Frame> frame;
  uint32_t collecting = 0;  // lanes that wait in a collective at pc
  uint32_t members = 0;     // of that collective
  uint64_t poll_stamp = 0;  // Block::events at its last failed mbarrier poll
};

enum class Wait : uint8_t { none, barrier, done };

struct AsyncState;  // async_copy.h

struct Warp {
  // What instructions use.
  uint8_t* base[kBases] = {};
  uint32_t mask = 0;    // lanes that execute this instruction: active and their guard is true
  uint32_t active = 0;  // lanes of the current split
  int pc = 0, next = 0;
  Block* block = nullptr;
  int index = 0;
  Frame* frame = nullptr;

  template <class T>
  T* out(const Operand& o) const {
    return reinterpret_cast<T*>(base[static_cast<int>(o.base)] + o.offset);
  }
  template <class T>
  const T* in(const Operand& o) const {
    return reinterpret_cast<const T*>(base[static_cast<int>(o.base)] + o.offset);
  }
  uint32_t predicate(const Operand& o) const { return o.negated ? ~*in<uint32_t>(o) : *in<uint32_t>(o); }
  void set_predicate(const Operand& o, uint32_t value) const {
    if (o.present) *out<uint32_t>(o) = (*out<uint32_t>(o) & ~mask) | (value & mask);
  }
  uint64_t lane_value(const Operand& o, int lane) const;  // of any width, zero-extended
  void set_lane_value(const Operand& o, int lane, uint64_t value) const;
  uint64_t uniform(const Operand& o) const;  // of the first lane; an error if lanes differ

  // Control flow.
  void start(const Function& kernel, uint32_t lanes);
  bool run(int budget);  // until it waits, is done or has spent the budget; whether it executed anything
  void jump(uint32_t taken, const Instruction& in);
  void call(const Instruction& in, const Function& callee);
  void return_lanes();
  void exit_lanes(uint32_t lanes);
  bool collect(uint32_t members, const char* name);  // all members are here and mask is theirs; else this split waits
  bool release_parked();                             // lanes that wait at a join go on alone; whether there are any
  bool idle() const;  // has polled in vain since anything happened in the block, all of its lanes
  bool converged() const { return splits.size() == 1 && active == alive; }
  void yield() { budget_ = 0; }

  uint32_t exists = 0, alive = 0;
  uint32_t carry = 0;  // the carry flag of each lane
  bool loose = false;  // lanes were let go from a join; they meet again at barriers
  std::vector<Split> splits;
  std::vector<Join> joins;
  std::vector<int> free_joins;  // indices that nobody uses
  size_t current = 0;
  Frame* entry = nullptr;
  std::vector<uint8_t> local, local_state;  // of each lane in turn
  int64_t local_bytes = 0;

  Wait wait = Wait::none;
  int barrier = -1;
  int polls = 0;  // failed mbarrier polls since anything happened in the block
  uint64_t poll_stamp = 0;
  std::vector<uint32_t> polled;  // the mbarriers of these polls
  std::shared_ptr<AsyncState> async;
  int registers_per_thread = 0, registers_wanted = 0;  // wanted: by a setmaxnreg.inc that waits; else 0
  // By register offset / 64, from the first wgmma.fence of this frame on: see async_copy.h.
  std::vector<uint8_t> register_state;
  const Frame* matrix_frame = nullptr;
  size_t matrix_count = 0;  // wgmmas issued
  uint64_t executed = 0;

 private:
  friend struct Block;
  void select(size_t split);
  void look_for_loop();
  uint64_t state_hash() const;
  void check_registers(const Instruction& in);
  void store();
  bool pick();  // another split that can run
  void arrive(uint32_t lanes);
  void leave(uint32_t lanes, int join, int until);
  void drop_current();
  int new_join(Join join);
  void copy_results(Frame& callee, uint32_t lanes) const;
  int budget_ = 0;
  int turns_ = 0;  // backward jumps of diverged lanes
  LoopWatch loop_;
};

struct Barrier {
  int expected = 0;  // threads; 0: nobody waits
  int arrived = 0;
  uint32_t arrived_warps = 0, waiting_warps = 0;
  Clock clock;
  uint32_t reduction_and = 1, reduction_or = 0, reduction_count = 0;
  uint32_t results[3] = {};
  bool all = false;  // bar.sync without a count: every warp that is not done
};

struct Flight {  // an asynchronous copy of an engine
  std::function<void()> land;
  uint32_t barrier;  // the mbarrier that it completes bytes or an arrival of
};

struct Block {
  Launch* launch = nullptr;
  Counters* counters = nullptr;
  int64_t number = 0;
  uint32_t index[3] = {};
  int threads = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  Clocks clocks;  // of the warps and of the copy engine
  BlockOrder order;
  SharedMemory shared;
  Barrier barriers[17];                             // the last one is the barrier of the cluster of one
  std::map<uint32_t, MBarrier> mbarriers;           // by shared address
  std::map<int, std::vector<uint64_t>> matrix_log;  // by warpgroup: what its wgmmas were, for warps to agree
  std::deque<Flight> flights;
  uint64_t idle_stamp = 0, idle_instructions = 0;  // executed since `events` was idle_stamp
  uint64_t events = 1;                             // grows when something happens that a waiting warp may wait for
  Progress* progress = nullptr;
  uint64_t watch = 0;     // not 0: warps look for loops that they cannot leave
  int register_pool = 0;  // that setmaxnreg.dec has given back
  std::mt19937_64 random;
  std::vector<int> turns;         // of the schedule
  std::vector<uint8_t> specials;  // one set per warp

  int copy_actor() const { return static_cast<int>(warps.size()); }
  void start(Launch& launch, int64_t number);
  bool done() const;
  bool step();  // runs one warp for a while; false: nobody can run
  void arrive(Barrier& barrier, Warp& warp, bool waits, int expected_threads, bool all);
  void release(int barrier);
  void changed() {  // memory, or what waiting depends on
    progress->changes.store(progress->changes.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void happened() {
    ++events;
    changed();
  }
  bool stuck() const;            // no warp can go on unless memory changes
  void warp_left();              // barriers without a count no longer wait for it
  void check_registers() const;  // throws if a warp waits for registers, which is why nobody can go on
  std::string where() const;

 private:
  int choose();
  size_t needed_flight() const;
};

enum class Copies : uint8_t { early, late, random };
enum class Schedule : uint8_t { in_order, random, adversarial };

struct Counters {
  std::vector<uint64_t> executions;           // by Instruction::id
  std::vector<uint64_t> shared_transactions;  // by Instruction::id
  std::vector<uint64_t> shared_ideal;
  uint64_t global_read_bytes = 0, global_read_sectors = 0, global_read_ideal = 0;
  uint64_t global_write_bytes = 0, global_write_sectors = 0, global_write_ideal = 0;
  uint64_t matrix_flops = 0, barriers = 0;
  std::string printed;
  uint64_t copied_bytes = 0;  // by bulk and tensor copies, out-of-range elements excluded
  void resize(int instructions);
  void add(const Counters& other);
};

struct Launch {
  Program* program = nullptr;
  const Function* kernel = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int64_t dynamic_shared = 0;
  std::vector<uint8_t> params;
  Memory memory;
  GlobalShadow shadow;
  uint64_t seed = 0;
  Copies copies = Copies::late;
  Schedule schedule = Schedule::in_order;
  bool check_races = true;
  int threads = 1;
  uint64_t limit = 0;  // warp instructions; 0: none
  Counters counters;
  uint32_t shared_base = 1024;
  int64_t static_shared = 0;
  std::mutex atomics;  // held by strong accesses, if there are several host threads
  std::atomic<uint64_t> executed{0};

  void run();
  std::unique_lock<std::mutex> strong_access() {
    return threads > 1 ? std::unique_lock<std::mutex>(atomics) : std::unique_lock<std::mutex>();
  }

 private:
  void check_limits() const;
  void relocate();
  void work(int thread, std::atomic<int64_t>& next, Counters& counters, std::atomic<bool>& failed);
  uint64_t changes() const;
  bool all_stuck(int thread, uint64_t watch);

  std::vector<Progress> progress_;  // of each host thread
};

std::string describe(const Launch& launch, const Block& block, const Warp& warp, const Fault& fault);

}  // namespace emulator
