#include "core/schedule.h"

namespace ringattn {
namespace {

int modulo(int a, int b) { return (a % b + b) % b; }

bool any_visible(const Segments& queries, const Segments& keys, const Mask& mask) {
  for (const Segment& q : queries) {
    for (const Segment& k : keys) {
      if (ringattn::any_visible(q, k, mask)) return true;
    }
  }
  return false;
}

}  // namespace

int reach(const Layout& queries, const Layout& keys, const Mask& mask) {
  const int P = queries.world_size();
  for (int distance = P - 1; distance > 0; --distance) {
    for (int rank = 0; rank < P; ++rank) {
      if (any_visible(queries.segments(rank), keys.segments(modulo(rank - distance, P)), mask)) return distance;
    }
  }
  return 0;
}

std::vector<ForwardStep> forward_schedule(const Layout& queries, const Layout& keys, const Mask& mask, int rank) {
  const int P = queries.world_size();
  const int R = reach(queries, keys, mask);
  std::vector<ForwardStep> steps;
  for (int s = 0; s <= R; ++s) {
    ForwardStep step;
    step.block = modulo(rank - s, P);
    step.visibility = visibility(queries.segments(rank), keys.segments(step.block), mask);
    step.finalize = s == R;
    if (R > 0) step.read_buffer = s % kBlockBuffers;
    if (s < R) {
      step.next_block = modulo(rank - s - 1, P);
      step.write_buffer = (s + 1) % kBlockBuffers;
      step.send_to = modulo(rank + 1, P);
      step.receive_from = modulo(rank - 1, P);
    }
    steps.push_back(step);
  }
  return steps;
}

std::vector<BackwardStep> backward_schedule(const Layout& queries, const Layout& keys, const Mask& mask, int rank) {
  const int P = queries.world_size();
  const int R = reach(queries, keys, mask);
  std::vector<BackwardStep> steps;
  for (int t = 0; t <= R; ++t) {
    BackwardStep step;
    step.block = modulo(rank - R + t, P);
    step.visibility = visibility(queries.segments(rank), keys.segments(step.block), mask);
    step.source = t == R ? Source::own : t == 0 ? Source::kept : Source::received;
    if (R > 0) {
      step.read_buffer = t % kBlockBuffers;
      step.send_to = modulo(rank - 1, P);
      step.receive_from = modulo(rank + 1, P);
    }
    if (t + 1 < R) {
      step.next_block = modulo(step.block + 1, P);
      step.write_buffer = (t + 1) % kBlockBuffers;
    }
    step.local_gradient = t % kGradientBuffers;
    if (t > 0) {
      step.outgoing_gradient = (t - 1) % kGradientBuffers;
      step.incoming_gradient = (t + 1) % kGradientBuffers;
      step.outgoing_block = modulo(step.block - 1, P);
    }
    steps.push_back(step);
  }
  return steps;
}

}  // namespace ringattn
