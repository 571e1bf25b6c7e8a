// The log: what a process enqueued on the streams of the double, in the order in which its host threads did it. A test
// reads it and decides from it alone what was ordered before what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace streams {

using Ranges = std::vector<std::pair<std::uintptr_t, std::uintptr_t>>;  // [begin, end) in bytes

struct Access {
  std::string name;  // of the argument
  bool writes = false;
  Ranges ranges;
};

// One message of an exchange: the n-th from one rank to another in their group.
struct Message {
  bool sends = false;
  std::string group;
  int from = 0, to = 0;
  std::int64_t place = 0;
  std::size_t access = 0;  // which of the entry's accesses is its buffer
};

// kind       | what happened; the fields in use beside thread
// operation  | enqueued on `stream`: name, accesses; an exchange has messages too
// record     | an event was recorded on `stream`; number is new with every record
// block      | `stream` waits for record `number`; kNever: the event has never been recorded
// host_wait  | the host waited: name says for what; `streams` are those whose work is over then
// query      | the host asked whether something is over
// allocate   | `ranges` of accesses[0] belong to a new tensor of `stream`'s pool; number is the block's
// free       | they no longer do; `streams` are those the block was recorded on
// mark       | a test's remark in `name`
// complaint  | the double itself saw an error
struct Entry {
  std::string kind;
  std::string name;
  int thread = 0;
  int stream = -1;
  std::int64_t number = 0;
  std::vector<int> streams;
  std::vector<Access> accesses;
  std::vector<Message> messages;
};

inline constexpr std::int64_t kNever = -1;

// Everything here may be called by any thread.
class Log {
 public:
  void add(Entry entry);
  void complain(std::string text) { add({.kind = "complaint", .name = std::move(text)}); }
  std::vector<Entry> entries() const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
};

Log& log();

// A fault that a test plants: occurrence number `nth` of what is called `name`, counted from 0 since the last clear, or
// every one.
inline constexpr std::int64_t kEvery = -1;
void plant_fault(const std::string& name, std::int64_t nth);
void clear_faults();
void pause_faults(bool pause);                      // meanwhile nothing goes wrong, and nothing is counted
bool fault(const std::string& name);                // counts, and says whether this one is to go wrong
std::int64_t occurrences(const std::string& name);  // so far

}  // namespace streams
