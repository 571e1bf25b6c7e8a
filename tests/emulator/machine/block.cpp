// One block: its barriers, and which of its warps runs next.
#include <algorithm>

#include "async_copy.h"
#include "machine.h"
#include "specials.h"

namespace emulator {

void Block::start(Launch& owner, int64_t which) {
  launch = &owner;
  number = which;
  index[0] = static_cast<uint32_t>(number % owner.grid[0]);
  index[1] = static_cast<uint32_t>(number / owner.grid[0] % owner.grid[1]);
  index[2] = static_cast<uint32_t>(number / owner.grid[0] / owner.grid[1]);
  random.seed(owner.seed * 0x9e3779b97f4a7c15ULL + static_cast<uint64_t>(number));
  threads = static_cast<int>(owner.block[0] * owner.block[1] * owner.block[2]);
  const int count = (threads + 31) / 32;
  specials.assign(static_cast<size_t>(count) * kSpecials * kSpecialBytes, 0);
  clocks.reset(count + 1);
  order.start(owner.shadow.publications, clocks, number);
  shared.reset(owner.shared_base, owner.static_shared + owner.dynamic_shared, clocks, owner.check_races);
  const int registers = owner.kernel->registers_at_entry(count * 32);
  for (int w = 0; w < count; ++w) {
    auto warp = std::make_unique<Warp>();
    warp->block = this;
    warp->index = w;
    warp->registers_per_thread = registers;
    warp->async = std::make_shared<AsyncState>();
    uint8_t* own = specials.data() + static_cast<size_t>(w) * kSpecials * kSpecialBytes;
    warp->base[2] = own;
    auto fill = [&](int special, auto value_of) {
      for (uint32_t lane = 0; lane < 32; ++lane) {
        const uint32_t value = value_of(lane);
        std::memcpy(own + special * kSpecialBytes + lane * (special >= kGridid ? 8 : 4), &value, 4);
      }
    };
    const uint32_t first = static_cast<uint32_t>(w) * 32;
    fill(kTidX, [&](uint32_t lane) { return (first + lane) % owner.block[0]; });
    fill(kTidY, [&](uint32_t lane) { return (first + lane) / owner.block[0] % owner.block[1]; });
    fill(kTidZ, [&](uint32_t lane) { return (first + lane) / owner.block[0] / owner.block[1]; });
    for (int axis = 0; axis < 3; ++axis) {
      fill(kNtidX + axis, [&](uint32_t) { return owner.block[axis]; });
      fill(kCtaidX + axis, [&](uint32_t) { return index[axis]; });
      fill(kNctaidX + axis, [&](uint32_t) { return owner.grid[axis]; });
      fill(kClusteridX + axis, [&](uint32_t) { return index[axis]; });
      fill(kNclusteridX + axis, [&](uint32_t) { return owner.grid[axis]; });
      fill(kClusterNctaidX + axis, [&](uint32_t) { return 1u; });
    }
    fill(kLaneid, [&](uint32_t lane) { return lane; });
    fill(kWarpid, [&](uint32_t) { return static_cast<uint32_t>(w); });
    fill(kNwarpid, [&](uint32_t) { return static_cast<uint32_t>(count); });
    fill(kNsmid, [&](uint32_t) { return 132u; });
    fill(kSmid, [&](uint32_t) { return static_cast<uint32_t>(number % 132); });
    fill(kLanemaskEq, [&](uint32_t lane) { return 1u << lane; });
    fill(kLanemaskLt, [&](uint32_t lane) { return (1u << lane) - 1; });
    fill(kLanemaskLe, [&](uint32_t lane) { return (2u << lane) - 1; });
    fill(kLanemaskGt, [&](uint32_t lane) { return ~((2u << lane) - 1); });
    fill(kLanemaskGe, [&](uint32_t lane) { return ~((1u << lane) - 1); });
    fill(kDynamicSmem, [&](uint32_t) { return static_cast<uint32_t>(owner.dynamic_shared); });
    fill(kTotalSmem, [&](uint32_t) { return static_cast<uint32_t>(shared.bytes()); });
    fill(kClusterNctarank, [&](uint32_t) { return 1u; });
    const int lanes = std::min(32, threads - w * 32);
    warp->start(*owner.kernel, lanes == 32 ? kAll : (1u << lanes) - 1);
    warps.push_back(std::move(warp));
    turns.push_back(w);
  }
  if (owner.schedule != Schedule::in_order) std::shuffle(turns.begin(), turns.end(), random);
}

bool Block::done() const {
  return std::all_of(warps.begin(), warps.end(), [](const auto& warp) { return warp->wait == Wait::done; });
}

// A warp that can run; -1: none. Warps whose last poll failed come last: nothing has happened since.
int Block::choose() {
  std::vector<int> ready, polling;
  for (int w : turns) {
    Warp& warp = *warps[w];
    if (warp.wait != Wait::none) continue;
    // When everything is quiet a poller may be what a spinning warp waits for.
    (warp.idle() && !watch ? polling : ready).push_back(w);
  }
  if (!flights.empty() && (ready.empty() || stuck())) return -2;
  if (ready.empty()) {
    if (polling.empty()) return -1;
    auto idlest = std::min_element(polling.begin(), polling.end(),
                                   [&](int x, int y) { return warps[x]->polls < warps[y]->polls; });
    if (warps[*idlest]->polls <= 64) return *idlest;
    for (int w : polling) {  // perhaps lanes wait at a join for lanes that wait for them
      if (!warps[w]->release_parked()) continue;
      warps[w]->polls = 0;
      return w;
    }
    return -1;
  }
  if (launch->schedule == Schedule::random) return ready[random() % ready.size()];
  if (launch->schedule == Schedule::in_order) {  // the next after the last one
    std::rotate(turns.begin(), std::find(turns.begin(), turns.end(), ready[0]) + 1, turns.end());
  }
  return ready[0];
}

// The latest legal moment of a copy is when a warp waits for its mbarrier and nobody can go on without it: copies that
// others wait for are no reason for it to land.
size_t Block::needed_flight() const {
  for (size_t i = 0; i < flights.size(); ++i)
    for (const auto& warp : warps)
      if (warp->polls && warp->poll_stamp == events &&
          std::find(warp->polled.begin(), warp->polled.end(), flights[i].barrier) != warp->polled.end())
        return i;
  return 0;
}

bool Block::step() {
  if (launch->copies == Copies::random && !flights.empty() && random() % 4 == 0)
    land_one(*this, random() % flights.size());
  int chosen = choose();
  if (chosen == -2) {
    land_one(*this, needed_flight());
    return true;
  }
  if (chosen < 0) return false;
  const int budget = launch->schedule == Schedule::random                  ? 1 + static_cast<int>(random() % 100)
                     : launch->schedule == Schedule::adversarial && !watch ? 100000
                                                                           : 1000;
  const uint64_t before = warps[chosen]->executed, changes_before = progress->changes;
  try {
    warps[chosen]->run(budget);
  } catch (const Fault& fault) {
    throw std::runtime_error(describe(*launch, *this, *warps[chosen], fault));
  }
  launch->executed += warps[chosen]->executed - before;
  if (progress->changes == changes_before && launch->schedule == Schedule::adversarial) {
    // It may spin for what another warp will do.
    turns.erase(std::find(turns.begin(), turns.end(), chosen));
    turns.push_back(chosen);
  }
  // Lanes that count or change memory while they spin escape the watch; they may wait for a copy that others wait
  // for, or for a warp that was never chosen.
  constexpr uint64_t kPatience = 1 << 20;
  idle_instructions = idle_stamp == events ? idle_instructions + warps[chosen]->executed - before : 0;
  idle_stamp = events;
  if (idle_instructions > kPatience) {
    idle_instructions = 0;
    if (!flights.empty()) land_one(*this, needed_flight());
    std::rotate(turns.begin(), turns.begin() + 1, turns.end());
  }
  return true;
}

void Block::arrive(Barrier& barrier, Warp& warp, bool waits, int expected_threads, bool all) {
  const int id = static_cast<int>(&barrier - barriers);
  const std::string name = "barrier " + std::to_string(id);
  if (warp.mask != warp.alive)
    throw Fault(name + ": executed by diverged lanes; lanes " + hex(warp.alive & ~warp.mask) + " are elsewhere");
  if (!all && (expected_threads <= 0 || expected_threads % 32 || expected_threads > 1024))
    throw Fault(name + ": wrong count " + std::to_string(expected_threads) + ", which is no multiple of 32");
  if (!all && expected_threads > align_up(threads, 32))
    throw Fault(name + ": wrong count " + std::to_string(expected_threads) + " for a block of " +
                std::to_string(threads));
  if (all) {
    expected_threads = 0;
    for (const auto& one : warps) expected_threads += one->wait == Wait::done ? 0 : 32;
  }
  if (barrier.arrived && barrier.expected != expected_threads && !(all && barrier.all))
    throw Fault(name + ": wrong count " + std::to_string(expected_threads) + ", others expect " +
                std::to_string(barrier.expected));
  if (barrier.arrived_warps >> warp.index & 1) throw Fault(name + ": this warp arrives twice in one generation");
  barrier.expected = expected_threads;
  barrier.all = all;
  barrier.arrived += 32;
  barrier.arrived_warps |= 1u << warp.index;
  if (barrier.arrived > barrier.expected)
    throw Fault(name + ": more arrivals than its count " + std::to_string(barrier.expected));
  changed();
  join(barrier.clock, clocks[warp.index]);
  clocks.tick(warp.index);
  clocks.meet(warp.index, kAll);
  if (waits) {
    barrier.waiting_warps |= 1u << warp.index;
    warp.wait = Wait::barrier;
    warp.barrier = id;
  }
  if (barrier.arrived == barrier.expected) release(id);
}

void Block::release(int id) {
  Barrier& barrier = barriers[id];
  ++counters->barriers;
  happened();
  const Barrier old = barrier;
  barrier = Barrier();
  barrier.results[0] = old.reduction_count;
  barrier.results[1] = old.reduction_and;
  barrier.results[2] = old.reduction_or;
  for (const auto& warp : warps) {
    if (!(old.waiting_warps >> warp->index & 1)) continue;
    warp->wait = Wait::none;
    join(clocks[warp->index], old.clock);
  }
}

void Block::warp_left() {
  happened();
  int left = 0;
  for (const auto& one : warps) left += one->alive ? 32 : 0;
  for (int id = 0; id < 17; ++id) {
    Barrier& barrier = barriers[id];
    if (!barrier.all || !barrier.arrived) continue;
    barrier.expected = left;
    if (barrier.arrived == left) release(id);
  }
}

std::string Block::where() const {
  std::string text = "\n  kernel " + launch->kernel->name + ", block (" + std::to_string(index[0]) + ", " +
                     std::to_string(index[1]) + ", " + std::to_string(index[2]) + ")";
  for (const auto& warp : warps) {
    if (warp->wait == Wait::done) continue;
    const Instruction& in =
        warp->frame->function->code[std::max(0, warp->wait == Wait::barrier ? warp->pc - 1 : warp->pc)];
    text += "\n  warp " + std::to_string(warp->index);
    if (warp->wait == Wait::barrier) {
      const Barrier& barrier = barriers[warp->barrier % 32];
      text += " waits at barrier " + std::to_string(warp->barrier % 32) + " (" + std::to_string(barrier.arrived) +
              " of " + std::to_string(barrier.expected) + " threads have arrived)";
    } else if (warp->registers_wanted) {
      text += " waits for registers";
    } else if (warp->polls) {
      text += " waits for an mbarrier or for its warpgroup";
    } else if (warp->loop_.looping) {
      text += " goes round in a loop that it cannot leave";
    }
    text += ", PTX line " + std::to_string(in.line);
    if (in.place.line) text += ", source line " + std::to_string(in.place.line);
  }
  return text;
}

void Block::check_registers() const {
  for (const auto& warp : warps) {
    if (!warp->registers_wanted) continue;
    const int have = warp->registers_per_thread, wanted = warp->registers_wanted;
    const Fault fault("setmaxnreg: the register pool can never serve " + std::to_string(wanted) +
                          " per thread: the warp has " + std::to_string(have) + ", lacks 32 * " +
                          std::to_string(wanted - have) + " = " + std::to_string(32 * (wanted - have)) +
                          ", and the pool holds " + std::to_string(register_pool),
                      kAll);
    throw std::runtime_error(describe(*launch, *this, *warp, fault) + where());
  }
}

std::string describe(const Launch& launch, const Block& block, const Warp& warp, const Fault& fault) {
  const auto& code = warp.frame->function->code;
  const Instruction& in = code[std::min<size_t>(warp.pc, code.size() - 1)];
  std::string text = fault.what();
  text += "\n  kernel " + launch.kernel->name + ", block (" + std::to_string(block.index[0]) + ", " +
          std::to_string(block.index[1]) + ", " + std::to_string(block.index[2]) + "), warp " +
          std::to_string(warp.index) + ", lanes";
  const uint32_t lanes = fault.lanes ? fault.lanes : warp.mask;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    int last = lane;
    while (last < 31 && lanes >> (last + 1) & 1) ++last;
    text += " " + std::to_string(lane) + (last > lane ? "-" + std::to_string(last) : "");
    lane = last;
  }
  if (in.line) {
    std::string line = launch.program->lines[in.line - 1];
    line.erase(0, line.find_first_not_of(" \t"));
    text += "\n  PTX line " + std::to_string(in.line) + ": " + line;
  }
  const char* word = "source ";
  for (const Place* place = &in.place; place; word = "inlined at ") {
    auto file = launch.program->files.find(place->file);
    if (file == launch.program->files.end()) break;
    text += std::string("\n  ") + word + file->second + ":" + std::to_string(place->line);
    place = place->site < 0 ? nullptr : &launch.program->sites[place->site].place;
  }
  return text;
}

}  // namespace emulator
