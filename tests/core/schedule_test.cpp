// Schedules: all ranks are played with symbolic buffers, in which a block is the number of its owner and a gradient
// accumulator is the list of the ranks whose parts it holds. What is being received holds nothing until it is there.
#include "core/schedule.h"

#include <optional>

#include "cases.h"

namespace ringattn::test {
namespace {

constexpr int kNothing = -2;

struct Problem {
  Layout queries, keys;
  Mask mask;
  int P() const { return queries.world_size(); }
};

std::ostream& operator<<(std::ostream& stream, const Problem& problem) {
  return stream << "queries " << problem.queries << " keys " << problem.keys << " " << problem.mask;
}

// visible[i][j]: by definition, what rank i may see of block j.
using Table = std::vector<std::vector<Visibility>>;

Table visibility_table(const Problem& problem) {
  Table table(problem.P(), std::vector<Visibility>(problem.P()));
  for (int i = 0; i < problem.P(); ++i) {
    const auto queries = positions(problem.queries.segments(i));
    for (int j = 0; j < problem.P(); ++j) {
      std::size_t pairs = 0;
      const auto keys = positions(problem.keys.segments(j));
      for (const std::int64_t q : queries) {
        for (const std::int64_t k : keys) pairs += allowed(problem.mask, q, k);
      }
      const bool all = pairs == queries.size() * keys.size();
      table[i][j] = pairs == 0 ? Visibility::skip : all ? Visibility::full : Visibility::partial;
    }
  }
  return table;
}

int farthest(const Table& table) {
  const int P = static_cast<int>(table.size());
  int result = 0;
  for (int i = 0; i < P; ++i) {
    for (int j = 0; j < P; ++j) {
      if (table[i][j] != Visibility::skip) result = std::max(result, (i - j + P) % P);
    }
  }
  return result;
}

// Returns the block on which each rank ends.
std::vector<int> play_forward(const Problem& problem, const Table& table, int R) {
  const int P = problem.P();
  std::vector<std::vector<ForwardStep>> steps;
  std::vector<std::vector<int>> buffers(P, std::vector<int>(kBlockBuffers, kNothing));
  std::vector<std::vector<int>> visits(P, std::vector<int>(P));
  std::vector<int> ended(P);
  for (int i = 0; i < P; ++i) {
    steps.push_back(forward_schedule(problem.queries, problem.keys, problem.mask, i));
    CHECK(static_cast<int>(steps[i].size()) == R + 1, problem, " rank ", i, " steps ", steps[i].size());
    if (static_cast<int>(steps[i].size()) != R + 1) return ended;
    if (steps[i][0].read_buffer != kOwnTensors) buffers[i][steps[i][0].read_buffer] = i;
  }
  for (int s = 0; s <= R; ++s) {
    const auto sent = buffers;
    for (int i = 0; i < P; ++i) {
      const ForwardStep& step = steps[i][s];
      const auto where = [&] { return text(problem, " rank ", i, " step ", s); };
      CHECK((step.next_block != kNone) == (s < R), where());
      if (step.next_block == kNone) {
        CHECK(step.write_buffer == kNone && step.send_to == kNone && step.receive_from == kNone, where());
      } else {
        const ForwardStep& neighbour = steps[step.receive_from][s];
        CHECK(step.write_buffer != step.read_buffer, where());
        CHECK(step.receive_from == (i + P - 1) % P && neighbour.send_to == i, where());
        CHECK(sent[step.receive_from][neighbour.read_buffer] == step.next_block, where());
        buffers[i][step.write_buffer] = kNothing;
      }
      // Compute, while the exchange is under way.
      CHECK((step.read_buffer == kOwnTensors ? i : buffers[i][step.read_buffer]) == step.block, where());
      CHECK(step.visibility == table[i][step.block], where());
      CHECK(step.finalize == (s == R), where());
      if (step.visibility != Visibility::skip) ++visits[i][step.block];
      ended[i] = step.block;
      if (step.next_block != kNone) {
        buffers[i][step.write_buffer] = sent[step.receive_from][steps[step.receive_from][s].read_buffer];
      }
    }
  }
  for (int i = 0; i < P; ++i) {
    for (int j = 0; j < P; ++j) CHECK(visits[i][j] == (table[i][j] != Visibility::skip), problem, " ", i, " ", j);
  }
  return ended;
}

struct Accumulator {
  int block = kNothing;
  std::vector<int> parts;
};

void play_backward(const Problem& problem, const Table& table, int R, const std::vector<int>& kept) {
  const int P = problem.P();
  std::vector<std::vector<BackwardStep>> steps;
  std::vector<std::vector<int>> buffers(P, std::vector<int>(kBlockBuffers, kNothing));
  std::vector<std::vector<Accumulator>> gradients(P, std::vector<Accumulator>(kGradientBuffers));
  for (int i = 0; i < P; ++i) {
    steps.push_back(backward_schedule(problem.queries, problem.keys, problem.mask, i));
    CHECK(static_cast<int>(steps[i].size()) == R + 1, problem, " rank ", i, " steps ", steps[i].size());
    if (static_cast<int>(steps[i].size()) != R + 1) return;
  }
  int block_hops = 0, gradient_hops = 0;
  for (int t = 0; t <= R; ++t) {
    for (int i = 0; i < P; ++i) {
      const BackwardStep& step = steps[i][t];
      if (step.read_buffer == kOwnTensors) {
        CHECK(step.source == Source::own, problem, " rank ", i, " step ", t);
      } else if (step.source != Source::received) {
        buffers[i][step.read_buffer] = step.source == Source::kept ? kept[i] : i;
      }
    }
    const auto sent = buffers;
    const auto sent_gradients = gradients;
    for (int i = 0; i < P; ++i) {
      const BackwardStep& step = steps[i][t];
      const auto where = [&] { return text(problem, " rank ", i, " step ", t); };
      const bool block_moves = step.next_block != kNone, gradient_moves = step.outgoing_gradient != kNone;
      CHECK(block_moves == (t + 1 < R) && gradient_moves == (t > 0), where());
      CHECK(step.source == (t == R ? Source::own : t == 0 ? Source::kept : Source::received), where());
      const BackwardStep* neighbour = nullptr;
      if (block_moves || gradient_moves) {
        neighbour = &steps[step.receive_from][t];
        CHECK(step.receive_from == (i + 1) % P && neighbour->send_to == i, where());
      }
      if (block_moves) {
        CHECK(step.write_buffer != step.read_buffer, where());
        CHECK(sent[step.receive_from][neighbour->read_buffer] == step.next_block, where());
        buffers[i][step.write_buffer] = kNothing;
      }
      if (gradient_moves) {
        CHECK(step.local_gradient != step.outgoing_gradient && step.local_gradient != step.incoming_gradient &&
                  step.outgoing_gradient != step.incoming_gradient,
              where());
        CHECK(sent_gradients[i][step.outgoing_gradient].block == step.outgoing_block, where());
        CHECK(sent_gradients[step.receive_from][neighbour->outgoing_gradient].block == step.block, where());
      } else {
        CHECK(step.incoming_gradient == kNone && step.outgoing_block == kNone, where());
      }
      // Compute, while the exchange is under way.
      CHECK((step.read_buffer == kOwnTensors ? i : buffers[i][step.read_buffer]) == step.block, where());
      CHECK(step.visibility == table[i][step.block], where());
      Accumulator& local = gradients[i][step.local_gradient];
      local = {step.block, {}};
      if (step.visibility != Visibility::skip) local.parts.push_back(i);
      // The exchange is done.
      if (block_moves) buffers[i][step.write_buffer] = sent[step.receive_from][neighbour->read_buffer];
      if (gradient_moves) {
        const Accumulator& arrived = sent_gradients[step.receive_from][neighbour->outgoing_gradient];
        local.parts.insert(local.parts.end(), arrived.parts.begin(), arrived.parts.end());
        gradients[i][step.outgoing_gradient] = gradients[i][step.incoming_gradient] = {};
      }
      if (i == 0) block_hops += block_moves, gradient_hops += gradient_moves;
    }
  }
  CHECK(gradient_hops == R && block_hops == std::max(R - 1, 0), problem, " ", gradient_hops, " ", block_hops);

  // Each accumulator is home, with one part of every rank that sees the block.
  for (int j = 0; j < P; ++j) {
    Accumulator& home = gradients[j][steps[j].back().local_gradient];
    std::vector<int> expected;
    for (int i = 0; i < P; ++i) {
      if (table[i][j] != Visibility::skip) expected.push_back(i);
    }
    std::sort(home.parts.begin(), home.parts.end());
    CHECK(home.block == j && home.parts == expected, problem, " block ", j);
  }
}

void check_problem(const Problem& problem) {
  const Table table = visibility_table(problem);
  const int R = farthest(table);
  CHECK(reach(problem.queries, problem.keys, problem.mask) == R, problem);
  play_backward(problem, table, R, play_forward(problem, table, R));
}

}  // namespace

void test_schedules(Random& random) {
  for (const LayoutKind kind : kLayouts) {
    for (int P = 1; P <= 17; ++P) {
      for (const std::int64_t N : {0, 1, P - 1, P, 2 * P + 1, 3 * P, 53, 97}) {
        const auto count = static_cast<std::int32_t>(N);
        const Layout layout(kind, P, N);
        check_problem({layout, layout, {.key_count = count}});
        check_problem({layout, layout, {.key_count = count, .right = 0}});
        check_problem({layout, layout, {.key_count = count, .left = 0, .right = 0}});
        check_problem({layout, layout, {.key_count = count, .left = 0}});
        for (int round = 0; round < 8; ++round) {
          const OwnedMask owner = random_mask(random, N, 0, N, N / between(random, 1, 5) + 1);
          check_problem({layout, layout, owner.mask()});
        }
        const std::int64_t keys = between(random, 0, 60);
        check_problem({layout, Layout(kind, P, keys), {.key_count = static_cast<std::int32_t>(keys)}});
      }
    }
  }
}

}  // namespace ringattn::test
