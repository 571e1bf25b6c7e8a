// Layouts: every token has one owner, cut points are where the definition puts them, lengths balance, bad input raises.
#include <stdexcept>

#include "cases.h"

namespace ringattn::test {
namespace {

// floor(chunk * N / chunks), in arithmetic that cannot overflow.
std::int64_t cut(std::int64_t chunk, std::int64_t chunks, std::int64_t N) {
  return static_cast<std::int64_t>(static_cast<__int128>(chunk) * N / chunks);
}

std::vector<std::int64_t> expected_positions(LayoutKind kind, std::int64_t P, std::int64_t N, std::int64_t rank) {
  std::vector<std::int64_t> result;
  const auto add = [&](std::int64_t from, std::int64_t to, std::int64_t stride) {
    for (std::int64_t p = from; p < to; p += stride) result.push_back(p);
  };
  if (P == 1) {
    add(0, N, 1);
  } else if (kind == LayoutKind::contiguous) {
    add(cut(rank, P, N), cut(rank + 1, P, N), 1);
  } else if (kind == LayoutKind::zigzag) {
    add(cut(rank, 2 * P, N), cut(rank + 1, 2 * P, N), 1);
    add(cut(2 * P - 1 - rank, 2 * P, N), cut(2 * P - rank, 2 * P, N), 1);
  } else {
    add(rank, N, P);
  }
  return result;
}

void check_layout(const Layout& layout) {
  const std::int64_t P = layout.world_size(), N = layout.seq_len();
  std::vector<int> owners(N);
  std::int64_t longest = 0, shortest = N;
  for (std::int64_t rank = 0; rank < P; ++rank) {
    const Segments segments = layout.segments(rank);
    for (const Segment& segment : segments) CHECK(segment.length > 0 && segment.stride > 0, layout, segment);
    CHECK(segments.count <= (layout.kind() == LayoutKind::zigzag && P > 1 ? 2 : 1), layout, " rank ", rank);
    CHECK(positions(segments) == expected_positions(layout.kind(), P, N, rank), layout, " rank ", rank);
    for (const std::int64_t p : positions(segments)) {
      CHECK(0 <= p && p < N, layout, " position ", p);
      if (0 <= p && p < N) ++owners[p];
    }
    CHECK(layout.length(rank) == static_cast<std::int64_t>(positions(segments).size()), layout, " rank ", rank);
    longest = std::max<std::int64_t>(longest, layout.length(rank));
    shortest = std::min<std::int64_t>(shortest, layout.length(rank));
  }
  for (std::int64_t p = 0; p < N; ++p) CHECK(owners[p] == 1, layout, " position ", p, " owners ", owners[p]);

  // The longest rank fills the capacity, but for one token where two chunks are rounded up and one is not longer.
  CHECK(longest <= layout.capacity(), layout, " longest ", longest, " capacity ", layout.capacity());
  CHECK(layout.capacity() - longest <= (layout.kind() == LayoutKind::zigzag ? 1 : 0), layout, " longest ", longest);
  if (N % P == 0) CHECK(longest == N / P && shortest == N / P, layout, " from ", shortest, " to ", longest);
}

void small_layouts(Random& random) {
  for (const LayoutKind kind : kLayouts) {
    for (std::int64_t P = 1; P <= 17; ++P) {
      for (std::int64_t N = 0; N <= 4 * P + 3; ++N) check_layout(Layout(kind, P, N));
      for (std::int64_t S = 0; S <= 20; ++S) check_layout(Layout(kind, P, P * S));
      for (const std::int64_t prime : {97, 101, 499}) check_layout(Layout(kind, P, prime));
      check_layout(Layout(kind, P, between(random, 0, 3000)));
    }
    check_layout(Layout(kind, between(random, 18, 300), between(random, 0, 3000)));
  }
}

void seven_tokens_on_four_ranks() {
  const std::vector<std::vector<std::int64_t>> expected[] = {
      {{0}, {1, 2}, {3, 4}, {5, 6}},  // contiguous
      {{6}, {0, 5}, {1, 4}, {2, 3}},  // zigzag: the first of eight chunks is empty
      {{0, 4}, {1, 5}, {2, 6}, {3}},  // striped
  };
  for (const LayoutKind kind : kLayouts) {
    const Layout layout(kind, 4, 7);
    CHECK(layout.capacity() == 2, layout);
    for (int rank = 0; rank < 4; ++rank) {
      CHECK(positions(layout.segments(rank)) == expected[static_cast<int>(kind)][rank], layout, " rank ", rank);
    }
  }
}

// Lengths and rings so large that 32 bits do not hold the products.
void huge_layouts(Random& random) {
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t N = kLargest - (round % 2 ? between(random, 0, 1000) : 0);
    const std::int64_t P = between(random, 2, round % 3 == 0 ? (std::int64_t{1} << 30) - 1 : 5000);
    for (const LayoutKind kind : kLayouts) {
      const Layout layout(kind, P, N);
      for (const std::int64_t rank : {std::int64_t{0}, between(random, 0, P - 1), P - 1}) {
        const Segments segments = layout.segments(rank);
        CHECK(layout.length(rank) <= layout.capacity(), layout, " rank ", rank);
        if (kind == LayoutKind::striped) {
          CHECK(segments.items[0].start == rank && segments.items[0].stride == P, layout, segments.items[0]);
          CHECK(N - P <= segments.items[0].last() && segments.items[0].last() < N, layout, segments.items[0]);
          continue;
        }
        const std::int64_t chunks = kind == LayoutKind::zigzag ? 2 * P : P;
        std::int32_t index = 0;
        for (const std::int64_t chunk : {rank, 2 * P - 1 - rank}) {
          if (chunk >= chunks) continue;
          const std::int64_t from = cut(chunk, chunks, N), to = cut(chunk + 1, chunks, N);
          if (from == to) continue;
          const Segment& segment = segments.items[index++];
          CHECK(segment.start == from && segment.last() == to - 1 && segment.stride == 1, layout, segment);
        }
        CHECK(index == segments.count, layout, " rank ", rank);
      }
    }
  }
}

void bad_input() {
  using Bad = std::invalid_argument;
  const auto make = [](std::int64_t P, std::int64_t N) { return [=] { Layout(LayoutKind::zigzag, P, N); }; };
  const std::int64_t most_ranks = (std::int64_t{1} << 30) - 1;
  CHECK(Layout(LayoutKind::zigzag, most_ranks, kLargest).world_size() == most_ranks);
  for (const std::int64_t P : {std::int64_t{0}, std::int64_t{-1}, most_ranks + 1, INT64_MAX, INT64_MIN}) {
    const std::string message = message_of<Bad>(make(P, 8));
    CHECK(contains(message, "world_size") && contains(message, std::to_string(P)), message);
    CHECK(contains(message, "from 1 to 2^30 - 1"), message);
  }
  for (const std::int64_t N : {std::int64_t{-1}, std::int64_t{kLargest} + 1, INT64_MAX, INT64_MIN}) {
    const std::string message = message_of<Bad>(make(4, N));
    CHECK(contains(message, "seq_len") && contains(message, std::to_string(N)), message);
  }
  for (const std::int64_t rank : {std::int64_t{-1}, std::int64_t{4}, INT64_MAX}) {
    const std::string message = message_of<Bad>([&] { Layout(LayoutKind::striped, 4, 8).segments(rank); });
    CHECK(contains(message, "rank") && contains(message, "0 to 3") && contains(message, std::to_string(rank)), message);
  }
  for (const LayoutKind kind : kLayouts) CHECK(parse_layout(layout_name(kind)) == kind);
  for (const char* name : {"", "Zigzag", "zigzag ", "ring"}) {
    const std::string message = message_of<Bad>([&] { parse_layout(name); });
    CHECK(contains(message, "layout") && contains(message, text("'", name, "'")), message);
  }
}

}  // namespace

void test_layouts(Random& random) {
  small_layouts(random);
  seven_tokens_on_four_ranks();
  huge_layouts(random);
  bad_input();
}

}  // namespace ringattn::test
