// Where diverged lanes come together: the immediate post-dominator of each branch.
//
// Lanes that leave early must not delay the others, so paths that only lead out do not count: a jump to a bare ret is
// an end of its own, unless it is the way in which the text falls into that ret. A branch that has no post-dominator in
// that reduced graph gets the one of the full graph.
#include <algorithm>

#include "program.h"

namespace emulator {

namespace {

struct Graph {
  std::vector<int> begin, end;               // instructions of block b
  std::vector<std::vector<int>> successors;  // block count: the exit
};

// Post-dominators by iteration over the reversed graph (Cooper, Harvey, Kennedy).
std::vector<int> post_dominators(const Graph& graph) {
  const int exit = static_cast<int>(graph.begin.size());
  std::vector<std::vector<int>> predecessors(exit + 1);
  for (int b = 0; b < exit; ++b)
    for (int s : graph.successors[b]) predecessors[s].push_back(b);
  std::vector<int> order, number(exit + 1, -1), stack = {exit}, next(exit + 1, 0);
  std::vector<bool> seen(exit + 1);
  seen[exit] = true;
  while (!stack.empty()) {
    const int b = stack.back();
    if (next[b] < static_cast<int>(predecessors[b].size())) {
      const int p = predecessors[b][next[b]++];
      if (!seen[p]) {
        seen[p] = true;
        stack.push_back(p);
      }
    } else {
      number[b] = static_cast<int>(order.size());
      order.push_back(b);
      stack.pop_back();
    }
  }
  std::vector<int> parent(exit + 1, -1);
  parent[exit] = exit;
  for (bool changed = true; changed;) {
    changed = false;
    for (auto b = order.rbegin(); b != order.rend(); ++b) {
      if (*b == exit) continue;
      int found = -1;
      for (int s : graph.successors[*b]) {
        if (parent[s] < 0) continue;
        if (found < 0) {
          found = s;
          continue;
        }
        int other = s;
        while (found != other) {
          while (number[found] < number[other]) found = parent[found];
          while (number[other] < number[found]) other = parent[other];
        }
      }
      if (found != parent[*b]) {
        parent[*b] = found;
        changed = true;
      }
    }
  }
  return parent;
}

}  // namespace

void find_joins(Function& function) {
  auto& code = function.code;
  const int count = static_cast<int>(code.size());
  std::vector<int> block_of(count + 1, -1);
  std::vector<bool> leads(count + 1);
  leads[0] = true;
  for (int i = 0; i < count; ++i) {
    if (code[i].target >= 0) leads[code[i].target] = true;
    for (int target : code[i].targets) leads[target] = true;
    if (is_branch(code[i]) || is_exit(code[i])) leads[i + 1] = true;
  }
  for (int i = 0; i < count; ++i) {  // lanes that call different functions meet behind the call
    if (!is_indirect_call(code[i])) continue;
    code[i].join = i + 1;
    code[i + 1].is_join = true;
  }
  Graph full;
  for (int i = 0; i < count; ++i) {
    if (leads[i]) {
      full.begin.push_back(i);
      full.end.push_back(i);
    }
    full.end.back() = i + 1;
    block_of[i] = static_cast<int>(full.begin.size()) - 1;
  }
  const int blocks = static_cast<int>(full.begin.size());
  full.successors.resize(blocks + 1);
  auto bare_exit = [&](int b) { return is_exit(code[full.begin[b]]) && code[full.begin[b]].guard < 0; };
  std::vector<bool> falls_in(blocks + 1);  // block b is reached by falling into it
  for (int b = 0; b < blocks; ++b) {
    const Instruction& last = code[full.end[b] - 1];
    auto& to = full.successors[b];
    if (is_exit(last)) to.push_back(blocks);
    if (is_branch(last)) {
      if (last.target >= 0) to.push_back(block_of[last.target]);
      for (int target : last.targets) to.push_back(block_of[target]);
    }
    if ((!is_exit(last) && !is_branch(last)) || last.guard >= 0) {
      if (b + 1 < blocks) {
        to.push_back(b + 1);
        falls_in[b + 1] = true;
      }
    }
  }
  Graph reduced = full;
  for (int b = 0; b < blocks; ++b) {
    auto& to = reduced.successors[b];
    to.erase(std::remove_if(to.begin(), to.end(),
                            [&](int s) {
                              if (s == blocks) return b != blocks - 1 && !falls_in[b];
                              return bare_exit(s) && s != b + 1;
                            }),
             to.end());
  }
  const std::vector<int> by_full = post_dominators(full), by_reduced = post_dominators(reduced);
  for (int b = 0; b < blocks; ++b) {
    Instruction& last = code[full.end[b] - 1];
    if (!is_branch(last)) continue;
    int join = by_reduced[b] >= 0 && by_reduced[b] < blocks ? by_reduced[b] : by_full[b];
    if (join < 0 || join >= blocks || bare_exit(join)) continue;
    last.join = full.begin[join];
    code[last.join].is_join = true;
  }
}

}  // namespace emulator
