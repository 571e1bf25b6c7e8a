// The shadow of global memory: who accessed what and when, so that accesses without an order between them are found
// (data races, as in shared.h), and generic writes that the async proxy does not see yet.
//
// Pages are made when they are touched. Their cells are as fine as the finest access that the page has seen. A cell
// knows the last write and two reads of different warps: with more readers a race of a write with one of them may be
// missed, but not with all of them.
#pragma once

#include <array>
#include <memory>
#include <mutex>

#include "memory.h"
#include "publications.h"

namespace emulator {

struct Block;
struct Launch;

class GlobalShadow {
 public:
  void start(const Launch& launch);

  // Generic accesses of a warp's lane. strong: an atomic, or an access whose order is not weak.
  void read(Block& block, int actor, int lane, uint64_t address, int bytes, bool strong);
  void write(Block& block, int actor, int lane, uint64_t address, int bytes, bool strong);

  // The async proxy reads for a warp. Until its mbarrier says so nobody knows that it has.
  void async_read(Block& block, int actor, int lane, uint64_t address, int bytes);
  // The async proxy writes for a warp: nobody may touch the bytes until that warp's wait_group, which ends the write.
  void begin_async_write(Block& block, int actor, int lane, uint64_t address, int bytes, bool reduces);
  void end_async_write(Block& block, int actor, int lane, uint64_t address, int bytes, bool reduces);

  Publications publications;

 private:
  struct Cell {
    Moment write, reads[2];
  };
  struct Page {
    int granule = 16;
    std::vector<Cell> cells;
    void refine(int to);
  };
  struct Access {  // the present one
    Block& block;
    Moment now;
    uint64_t address;  // of the cell
  };
  template <class F>
  void each_cell(Access& access, int bytes, F f);
  void check_lanes(const Access& access, Moment write) const;
  void check_proxy(const Access& access, Moment write) const;
  void remember_read(const Access& access, Cell& cell, Moment read) const;
  void overwrite(const Access& access, Cell& cell, Moment write) const;
  std::string name(const Access& access, Moment moment) const;
  [[noreturn]] void race(const Access& access, const char* what, Moment other) const;

  const Launch* launch_ = nullptr;
  std::vector<std::vector<std::unique_ptr<Page>>> windows_;
  std::array<std::mutex, 64> locks_;  // of pages, when several host threads run
};

}  // namespace emulator
