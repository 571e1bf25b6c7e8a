// Masks: intervals, visibility and pair counts against the definition, over all pairs of positions.
#include "cases.h"

namespace ringattn::test {
namespace {

template <typename Tokens>
Visibility expected_visibility(const Tokens& queries, const Tokens& keys, const Mask& mask, std::int64_t* pairs) {
  std::int64_t all = 0;
  *pairs = 0;
  for (const std::int64_t q : positions(queries)) {
    for (const std::int64_t k : positions(keys)) {
      ++all;
      *pairs += allowed(mask, q, k);
    }
  }
  return *pairs == 0 ? Visibility::skip : *pairs == all ? Visibility::full : Visibility::partial;
}

void check_visibility(const Segment& q, const Segment& k, const Mask& mask) {
  std::int64_t pairs;
  const Visibility expected = expected_visibility(q, k, mask, &pairs);
  CHECK(visibility(q, k, mask) == expected, "queries ", q, " keys ", k, " ", mask);
  CHECK(any_visible(q, k, mask) == (pairs > 0), "queries ", q, " keys ", k, " ", mask);
  CHECK(visible_pairs({{q}, 1}, {{k}, 1}, mask) == pairs, "queries ", q, " keys ", k, " ", mask);
}

// The interval of each position holds the allowed keys and no other; its ends never decrease.
void intervals(Random& random) {
  for (int round = 0; round < 3000; ++round) {
    const std::int64_t N = round % 10 == 0 ? 0 : between(random, 1, 40);
    const OwnedMask owner = random_mask(random, N, 0, N, 45);
    const Mask mask = owner.mask();
    // Positions beyond the keys: cross attention, which has no documents.
    const std::int64_t queries = owner.bounds.empty() ? 60 : N;
    for (std::int64_t q = 0; q < queries; ++q) {
      const std::int64_t first = mask.first_key(static_cast<std::int32_t>(q));
      const std::int64_t last = mask.last_key(static_cast<std::int32_t>(q));
      for (std::int64_t k = -3; k < N + 3; ++k) {
        CHECK((first <= k && k <= last) == allowed(mask, q, k), mask, " query ", q, " key ", k);
      }
      if (q < N) CHECK(first <= q && q <= last, mask, " query ", q);  // a token sees itself
      if (q == 0) continue;
      CHECK(mask.first_key(static_cast<std::int32_t>(q - 1)) <= first, mask, " query ", q);
      CHECK(mask.last_key(static_cast<std::int32_t>(q - 1)) <= last, mask, " query ", q);
    }
  }
}

// The queries that see a key are those whose interval holds it: also queries behind all keys, which documents leave in
// the last one, and positions up to 2^31 - 2.
void queries_of_keys(Random& random) {
  const auto check = [](const Mask& mask, std::int64_t q, std::int64_t k) {
    const auto query = static_cast<std::int32_t>(q), key = static_cast<std::int32_t>(k);
    const bool seen = mask.first_key(query) <= key && key <= mask.last_key(query);
    CHECK((mask.first_query(key) <= query && query <= mask.last_query(key)) == seen, mask, " query ", q, " key ", k);
  };
  for (int round = 0; round < 3000; ++round) {
    const std::int64_t N = between(random, 1, 40);
    const OwnedMask owner = random_mask(random, N, 0, N, 45);
    for (std::int64_t k = 0; k < N; ++k) {
      for (std::int64_t q = 0; q < N + 50; ++q) check(owner.mask(), q, k);
      for (std::int64_t q = kLargest - 5; q < kLargest; ++q) check(owner.mask(), q, k);
      if (k == 0) continue;
      const auto key = static_cast<std::int32_t>(k);
      CHECK(owner.mask().first_query(key - 1) <= owner.mask().first_query(key), owner.mask(), " key ", k);
      CHECK(owner.mask().last_query(key - 1) <= owner.mask().last_query(key), owner.mask(), " key ", k);
    }
  }
  for (int round = 0; round < 200; ++round) {  // long sequences: both ends
    const std::int64_t N = kLargest - between(random, 0, 20);
    const bool near_end = round % 2 == 0;
    const OwnedMask owner = random_mask(random, N, near_end ? N - 60 : 0, N, near_end ? 60 : N / 3);
    std::vector<std::int64_t> some;
    for (std::int64_t i = 0; i < 40; ++i)
      some.insert(some.end(), {i, kLargest - 1 - i, between(random, 0, kLargest - 1)});
    for (const std::int64_t k : some) {
      if (k >= N) continue;
      for (const std::int64_t q : some) check(owner.mask(), q, k);
    }
  }
}

void document_of_position(Random& random) {
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t N = between(random, 1, 30);
    OwnedMask owner{.key_count = static_cast<std::int32_t>(N), .bounds = random_documents(random, N, 0, N)};
    const Mask mask = owner.mask();
    for (std::int32_t p = 0; p < N; ++p) {
      const std::int32_t d = mask.document_of(p);
      CHECK(0 <= d && d < mask.document_count, mask, " position ", p, " document ", d);
      CHECK(owner.bounds[d] <= p && p < owner.bounds[d + 1], mask, " position ", p, " document ", d);
    }
  }
}

// A segment inside [from, to), any stride up to `stride`, at most 10 tokens; may be empty.
Segment random_segment(Random& random, std::int64_t from, std::int64_t to, std::int64_t stride) {
  const std::int64_t start = between(random, from, to - 1);
  const std::int64_t step = between(random, 0, 2) == 0 ? 1 : between(random, 1, stride);
  const std::int64_t room = (to - 1 - start) / step + 1;
  return {static_cast<std::int32_t>(start), static_cast<std::int32_t>(step),
          static_cast<std::int32_t>(between(random, 0, std::min<std::int64_t>(room, 10)))};
}

void small_segments(Random& random) {
  for (int round = 0; round < 200000; ++round) {
    const std::int64_t N = between(random, 1, 50);
    const OwnedMask owner = random_mask(random, N, 0, N, 55);
    const Segment q = random_segment(random, 0, N, 9);
    Segment k = random_segment(random, 0, N, 9);
    if (round % 3 == 0) {  // the stride of the queries, as all ranks of a striped layout have
      k.stride = q.stride;
      k.length = static_cast<std::int32_t>(std::min<std::int64_t>(k.length, (N - 1 - k.start) / k.stride + 1));
    }
    check_visibility(q, k, owner.mask());
  }
}

// Positions up to 2^31 - 2, strides and windows of all sizes: sums and differences leave 32 bits.
void huge_segments(Random& random) {
  for (int round = 0; round < 100000; ++round) {
    const std::int64_t N = kLargest - (round % 4 == 0 ? between(random, 0, 50) : 0);
    const std::int64_t near_end = N - 60;
    const bool whole_range = round % 2 == 0;  // else both close together, at the very end
    const std::int64_t from = whole_range ? 0 : near_end;
    const std::int64_t stride = whole_range ? std::int64_t{1} << between(random, 0, 30) : 9;
    const OwnedMask owner = random_mask(random, N, from, N, whole_range ? N / between(random, 1, 50) : 60);
    const auto segment = [&] {
      const std::int64_t start = between(random, 0, 2) == 0 ? near_end : from;
      return random_segment(random, start, N, stride);
    };
    check_visibility(segment(), segment(), owner.mask());
  }
}

void largest_distance() {
  const Segment first{0, 1, 1}, last{kLargest - 1, 1, 1}, both{0, kLargest - 1, 2};
  for (const std::int32_t width : {0, kLargest - 2, kLargest - 1, kUnbounded}) {
    for (const Mask& mask : {Mask{.key_count = kLargest, .left = width}, Mask{.key_count = kLargest, .right = width}}) {
      for (const Segment& q : {first, last, both}) {
        for (const Segment& k : {first, last, both}) check_visibility(q, k, mask);
      }
    }
  }
}

void cross_lengths(Random& random) {
  for (int round = 0; round < 5000; ++round) {
    const Mask full{.key_count = static_cast<std::int32_t>(between(random, 0, 30))};
    const Segment q = random_segment(random, 0, round % 5 == 0 ? kLargest : 60, 9);
    const Segment k = full.key_count > 0 ? random_segment(random, 0, full.key_count, 9) : Segment{};
    check_visibility(q, k, full);
  }
}

// All tokens of two ranks: pairs of up to two segments each.
void ranks(Random& random) {
  for (int round = 0; round < 5000; ++round) {
    const std::int64_t P = between(random, 1, 8), N = between(random, 0, 40);
    const Layout queries(kLayouts[between(random, 0, 2)], P, N), keys(kLayouts[between(random, 0, 2)], P, N);
    const OwnedMask owner = random_mask(random, N, 0, N, 45);
    const Segments q = queries.segments(between(random, 0, P - 1)), k = keys.segments(between(random, 0, P - 1));
    std::int64_t pairs;
    const Visibility expected = expected_visibility(q, k, owner.mask(), &pairs);
    CHECK(visibility(q, k, owner.mask()) == expected, queries, " ", keys, " ", owner.mask());
    CHECK(visible_pairs(q, k, owner.mask()) == pairs, queries, " ", keys, " ", owner.mask());
  }
}

void parts_of_segments(Random& random) {
  for (int round = 0; round < 1000; ++round) {
    const Segment whole = random_segment(random, kLargest - 100, kLargest, 12);
    const std::int64_t offset = between(random, 0, std::max(whole.length - 1, 0));
    const std::int64_t count = between(random, 0, whole.length - offset);
    const auto all = positions(whole);
    const Segment part = whole.part(static_cast<std::int32_t>(offset), static_cast<std::int32_t>(count));
    CHECK(positions(part) == std::vector(all.begin() + offset, all.begin() + offset + count), whole, " part ", part);
    if (whole.length > 0) CHECK(whole.last() == all.back(), whole);
  }
}

}  // namespace

void test_masks(Random& random) {
  intervals(random);
  queries_of_keys(random);
  document_of_position(random);
  small_segments(random);
  huge_segments(random);
  largest_distance();
  cross_lengths(random);
  ranks(random);
  parts_of_segments(random);
}

}  // namespace ringattn::test
