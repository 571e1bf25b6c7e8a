// Headers: all ranks come to the same clear verdict from the same bytes, whatever a peer sent.
#include "core/header.h"

#include <bit>
#include <cstring>
#include <set>
#include <type_traits>

#include "check.h"
#include "core/mask.h"

namespace ringattn::test {
namespace {

struct Example {
  Field field;
  std::int64_t first, second;
  const char *name, *first_text, *second_text;  // what a verdict says
};

const std::int64_t kHalf = std::bit_cast<std::int64_t>(0.5), kTenth = std::bit_cast<std::int64_t>(0.1);

const Example kExamples[] = {
    {Field::protocol, 1, CallHeader::kProtocol, "the protocol of ringattn_ext", "0x0000000000000001",
     "0x52494e4741545433"},
    {Field::op, 0, 1, "the operator", "ring_forward", "ring_backward"},
    {Field::call, 7, 8, "the call number on this group", "7", "8"},
    {Field::dtype, 6, 15, "dtype", "float32", "bfloat16"},
    {Field::device, 0, 1, "the kind of device", "cpu", "cuda"},
    {Field::layout, 1, 2, "layout", "zigzag", "striped"},
    {Field::seq_len, 4096, 4095, "seq_len", "4096", "4095"},
    {Field::key_seq_len, 5, 6, "key_seq_len", "5", "6"},
    {Field::batch, 1, 2, "the batch size", "1", "2"},
    {Field::query_heads, 8, 4, "the number of query heads", "8", "4"},
    {Field::key_heads, 2, 1, "the number of key/value heads", "2", "1"},
    {Field::head_dim, 64, 128, "head_dim", "64", "128"},
    {Field::causal, 0, 1, "is_causal", "False", "True"},
    {Field::window_left, Mask::kUnbounded, 5, "window (left)", "unbounded", "5"},
    {Field::window_right, 0, Mask::kUnbounded, "window (right)", "0", "unbounded"},
    {Field::document_count, 3, 2, "the number of documents in cu_seqlens", "3", "2"},
    {Field::document_hash, 255, -1, "the hash of cu_seqlens", "0x00000000000000ff", "0xffffffffffffffff"},
    {Field::scale, kHalf, kTenth, "scale", "0.5", "0.10000000000000001"},
    {Field::deterministic, 1, 0, "deterministic", "True", "False"},
    {Field::needs_grad, 5, 0, "which inputs need gradients", "query, value", "none"},
    {Field::forward_call, 3, 4, "the call number of the forward pass that this is the backward pass of", "3", "4"},
    {Field::gather_dim, 2, 1, "dim", "2", "1"},
    {Field::gather_outer, 3, 4, "the number of elements before dim", "3", "4"},
    {Field::gather_inner, 3, CallHeader::kUnset, "the number of elements after dim", "3", "none"},
    {Field::gather_sizes, 255, 256, "the hash of the sizes other than dim", "0x00000000000000ff", "0x0000000000000100"},
    {Field::members, 255, 256, "the hash of the members of the group", "0x00000000000000ff", "0x0000000000000100"},
    {Field::check, 0, 2, "RINGATTN_CHECK", "auto", "off"},
};
static_assert(std::size(kExamples) == static_cast<std::size_t>(Field::count));

// What another rank makes of the same headers: they come over the wire as bytes, into memory with other contents.
std::string verdict_elsewhere(const std::vector<CallHeader>& headers) {
  static_assert(std::is_trivially_copyable_v<CallHeader>);
  static_assert(std::has_unique_object_representations_v<CallHeader>);  // no padding, whose bytes would be stray
  std::vector<CallHeader> copies(headers.size());
  for (CallHeader& copy : copies) copy.refuse(std::string(300, 'x'));
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    std::memcpy(static_cast<void*>(&copies[rank]), &headers[rank], sizeof(CallHeader));
  }
  return verdict(copies).text;
}

std::string checked_verdict(const std::vector<CallHeader>& headers) {
  const std::string result = verdict(headers).text;
  CHECK(verdict_elsewhere(headers) == result, result);
  return result;
}

CallHeader usual_header() {
  CallHeader header;
  for (const Example& example : kExamples) header.set(example.field, example.first);
  return header;
}

void equal_headers() {
  CHECK(checked_verdict({}).empty());
  for (int P = 1; P <= 17; ++P) {
    CHECK(checked_verdict(std::vector(P, CallHeader())).empty(), P);
    CHECK(checked_verdict(std::vector(P, usual_header())).empty(), P);
  }
  CallHeader header;
  CHECK(header.get(Field::protocol) == CallHeader::kProtocol && header.get(Field::scale) == CallHeader::kUnset);
  header.set(Field::scale, 0.5);
  header.set(Field::batch, std::int64_t{3});
  CHECK(header.get(Field::scale) == kHalf && header.get(Field::batch) == 3);
}

std::string run_of_ranks(std::size_t first, std::size_t last) {
  if (first == last) return text("rank ", first, " has ");
  return text("ranks ", first, last == first + 1 ? " and " : "-", last, " have ");
}

// The rank that is to blame, if the others agree; between two ranks nobody can say.
void odd_ranks() {
  std::vector<CallHeader> headers(5, usual_header());
  CHECK(verdict(headers).rank == -1);
  headers[3].set(Field::head_dim, std::int64_t{32});
  CHECK(verdict(headers).rank == 3);
  CHECK(checked_verdict(headers) == "ranks disagree on head_dim: ranks 0-2 and 4 have 64, rank 3 has 32",
        verdict(headers).text);
  headers[1].set(Field::head_dim, std::int64_t{32});
  CHECK(verdict(headers).rank == -1);
  CHECK(checked_verdict(headers) == "ranks disagree on head_dim: ranks 0, 2 and 4 have 64, ranks 1 and 3 have 32",
        verdict(headers).text);
  headers.resize(2);
  CHECK(verdict(headers).rank == -1 && !verdict(headers).text.empty());
  headers[1].refuse("no");
  CHECK(verdict(headers).rank == 1);

  std::vector<CallHeader> all(7, usual_header());
  for (std::size_t rank = 0; rank < all.size(); ++rank) all[rank].set(Field::batch, static_cast<std::int64_t>(rank));
  CHECK(verdict(all).rank == -1);
  CHECK(checked_verdict(all) ==
            "ranks disagree on the batch size: rank 0 has 0, rank 1 has 1, rank 2 has 2, rank 3 has 3, and there are 3 "
            "more values",
        verdict(all).text);
}

void differing_fields(Random& random) {
  for (const Example& example : kExamples) {
    for (int P = 2; P <= 5; ++P) {
      const auto rank = static_cast<std::size_t>(between(random, 1, P - 1));
      std::vector<CallHeader> headers(P, usual_header());
      // Ranks behind it differ as well.
      for (std::size_t r = rank; r < headers.size(); ++r) headers[r].set(example.field, example.second);
      const std::string expected = text("ranks disagree on ", example.name, ": ", run_of_ranks(0, rank - 1),
                                        example.first_text, ", ", run_of_ranks(rank, P - 1), example.second_text);
      CHECK(checked_verdict(headers) == expected, verdict(headers).text, " instead of ", expected);

      // Of several fields the first in the order of Field counts, whichever rank it is on.
      for (const Example& other : kExamples) {
        if (other.field <= example.field) continue;
        auto more = headers;
        more[1].set(other.field, other.second);
        CHECK(checked_verdict(more) == expected, verdict(more).text, " instead of ", expected);
      }
    }
  }
  // Rank 0 is the odd one.
  std::vector<CallHeader> headers(3, usual_header());
  headers[0].set(Field::head_dim, std::int64_t{32});
  CHECK(checked_verdict(headers) == "ranks disagree on head_dim: rank 0 has 32, ranks 1 and 2 have 64",
        verdict(headers).text);
}

void refusals() {
  std::vector<CallHeader> headers(4, usual_header());
  headers[1].set(Field::head_dim, std::int64_t{0});
  headers[2].refuse("query: expected 4 dimensions, got 3");
  headers[3].refuse("later");
  CHECK(checked_verdict(headers) == "rank 2 refused: query: expected 4 dimensions, got 3", verdict(headers).text);
  headers[2].refuse("short");  // leaves nothing of the longer text
  CHECK(checked_verdict(headers) == "rank 2 refused: short", verdict(headers).text);
  headers[0].refuse("");
  CHECK(checked_verdict(headers) == "rank 0 refused: ", verdict(headers).text);

  // A rank of another protocol says nothing else that could be understood.
  auto others = headers;
  std::memset(static_cast<void*>(&others[3]), 0xff, sizeof(CallHeader));
  CHECK(contains(checked_verdict(others), "ranks disagree on the protocol of ringattn_ext: ranks 0-2 have "),
        verdict(others).text);

  const std::size_t room = sizeof(CallHeader::reason);
  headers[0].refuse(std::string(1000, 'y'));
  CHECK(headers[0].reason[room - 1] == '\0');
  CHECK(checked_verdict(headers) == "rank 0 refused: " + std::string(room - 1, 'y'), verdict(headers).text);
  std::memset(headers[0].reason, 'z', room);  // no terminator, from a peer
  CHECK(checked_verdict(headers) == "rank 0 refused: " + std::string(room, 'z'), verdict(headers).text);

  // A text of several bytes per character is cut between characters: Python could not decode half of one.
  for (const std::string& character : {std::string("é"), std::string("→"), std::string("𝛁")}) {
    for (std::size_t before = 0; before < 5; ++before) {
      std::string whole(before, 'a');
      while (whole.size() < 600) whole += character;
      headers[0].refuse(whole);
      const std::size_t kept = before + (room - 1 - before) / character.size() * character.size();
      CHECK(checked_verdict(headers) == "rank 0 refused: " + whole.substr(0, kept), verdict(headers).text);
    }
  }
}

// Any bytes at all give a text, or nothing if they are equal.
void stray_bytes(Random& random) {
  for (int round = 0; round < 2000; ++round) {
    std::vector<CallHeader> headers(static_cast<std::size_t>(between(random, 2, 4)), usual_header());
    CallHeader& stray =
        headers[static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(headers.size()) - 1))];
    if (round % 2 == 0) {
      for (std::int64_t& field : stray.fields) field = static_cast<std::int64_t>(random());
      if (round % 4 == 0) stray.set(Field::protocol, usual_header().get(Field::protocol));
    } else {
      const auto field = static_cast<Field>(between(random, 0, static_cast<int>(Field::count) - 1));
      stray.set(field, between(random, -3, 20));
      if (stray.get(field) == usual_header().get(field)) continue;
    }
    if (round % 5 == 0) {
      stray.refused = static_cast<std::int64_t>(random() | 1);
      for (char& byte : stray.reason) byte = static_cast<char>(random() & 0x7f);
    }
    const bool same_protocol = stray.get(Field::protocol) == usual_header().get(Field::protocol);
    const std::string result = checked_verdict(headers);
    CHECK(contains(result, stray.refused && same_protocol ? "refused: " : "ranks disagree on "), result);
    CHECK(contains(result, "the protocol") != same_protocol, result);
  }
}

void hashes(Random& random) {
  // FNV-1a over the little-endian bytes, from an independent implementation.
  CHECK(static_cast<std::uint64_t>(document_hash({})) == 0xcbf29ce484222325u);
  CHECK(static_cast<std::uint64_t>(document_hash({0, 5, 8192})) == 0xceb12dad8363c750u);
  CHECK(static_cast<std::uint64_t>(document_hash({0, 2147483647})) == 0x3ccfaa862a5669a1u);

  std::set<std::vector<std::int32_t>> bounds;
  std::set<std::int64_t> hashes;
  const auto add = [&](std::vector<std::int32_t> documents) {
    if (bounds.insert(documents).second) {
      CHECK(hashes.insert(document_hash(documents)).second, "two bounds with one hash");
    }
  };
  for (const auto& documents : std::vector<std::vector<std::int32_t>>{
           {0}, {0, 0}, {0, 9}, {0, 0, 9}, {0, 9, 9}, {0, 4, 9}, {0, 5, 9}, {0, 4, 5, 9}, {0, 256}, {0, 65536}}) {
    add(documents);
  }
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::int32_t> documents = {0};
    for (std::int64_t count = between(random, 1, 5); count > 0; --count) {
      documents.push_back(documents.back() + static_cast<std::int32_t>(between(random, 0, 9)));
    }
    add(documents);
  }
}

}  // namespace

void test_headers(Random& random) {
  equal_headers();
  odd_ranks();
  differing_fields(random);
  refusals();
  stray_bytes(random);
  hashes(random);
}

}  // namespace ringattn::test
