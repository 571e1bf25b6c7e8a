// The ring's schedules as data: who holds which block at which step, how far the ring turns, which buffer is read and
// which is written. The loops in ring/ only carry out what these lists say; tests prove the lists.
//
// Forward, rank i, step s works on block i-s (mod P); between two steps all blocks move one seat up (i sends to i+1).
// The ring stops after R hops, R being the reach: the largest distance at which any rank needs a block.
//
// Backward turns the ring round (i sends to i-1). At its step t, rank i works on block i-R+t: first the block on which
// forward ended, which was kept, last its own, which it has. So keys and values make R-1 hops. The gradient accumulator
// of a block starts at the rank farthest from its owner and follows the block, one step behind: rank i sends the
// accumulator of the step before while it computes, receives the one of the block in hand, and adds its own
// contribution, kept apart so far, when that has arrived. After R such hops, the last under the last compute,
// accumulators are home.
#pragma once

#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/mask.h"

namespace ringattn {

inline constexpr int kNone = -1;
inline constexpr int kOwnTensors = -1;      // a read buffer: the caller's key and value, in place
inline constexpr int kBlockBuffers = 2;     // packed keys and values: one is read, the other is received into
inline constexpr int kGradientBuffers = 3;  // accumulators: one goes out, one comes in, one takes this step's part

struct ForwardStep {
  int block = 0;
  Visibility visibility = Visibility::skip;
  bool finalize = false;  // the last step of the pass

  int read_buffer = kOwnTensors;

  // The exchange that runs under this step's compute; kNone in next_block: there is none.
  int next_block = kNone;
  int write_buffer = kNone;
  int send_to = kNone;
  int receive_from = kNone;
};

// Where a backward step finds its block.
enum class Source : std::int32_t { kept, received, own };

struct BackwardStep {
  int block = 0;
  Visibility visibility = Visibility::skip;
  Source source = Source::own;
  int read_buffer = kOwnTensors;

  int send_to = kNone;
  int receive_from = kNone;

  // The block that arrives under this step's compute, unless it is kNone.
  int next_block = kNone;
  int write_buffer = kNone;

  // Gradient buffers: this step's contribution; the finished accumulator of the block before, on its way to send_to;
  // the accumulator of this block, on its way from receive_from. kNone at the first step.
  int local_gradient = 0;
  int outgoing_gradient = kNone;
  int incoming_gradient = kNone;
  int outgoing_block = kNone;
};

// The largest distance d such that some rank i may see keys of block i-d (mod P).
int reach(const Layout& queries, const Layout& keys, const Mask& mask);

std::vector<ForwardStep> forward_schedule(const Layout& queries, const Layout& keys, const Mask& mask, int rank);
std::vector<BackwardStep> backward_schedule(const Layout& queries, const Layout& keys, const Mask& mask, int rank);

}  // namespace ringattn
