// The header that every rank shows the others before any payload moves: what it is about to do, as numbers with names.
//
// All ranks see the headers of all, so all come to the same verdict and raise the same error, instead of hanging or
// computing with each other's wrong bytes. A rank that refuses its own input sends a header that says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ringattn {

enum class Op : std::int64_t { ring_forward, ring_backward, gather, refuse, init };

// In the order in which disagreements are reported. Adding one: here and in the table of header.cpp.
enum class Field : int {
  protocol,
  op,
  call,
  dtype,   // a c10::ScalarType
  device,  // a c10::DeviceType
  layout,
  seq_len,
  key_seq_len,
  batch,
  query_heads,
  key_heads,
  head_dim,
  causal,
  window_left,
  window_right,
  document_count,
  document_hash,
  scale,
  deterministic,
  needs_grad,
  forward_call,  // of ring_backward: the call number of the forward pass that it belongs to
  gather_dim,
  gather_outer,
  gather_inner,
  gather_sizes,  // a hash
  members,       // a hash of the global ranks of the group
  check,         // which calls the ranks compare (RINGATTN_CHECK)
  count          // not a field
};

// Ranks of two versions of the library agree on nothing but the size and where the protocol stands: gloo ends a process
// that is sent more than it expects.
struct CallHeader {
  static constexpr std::int64_t kProtocol = 0x52494e4741545433;  // changes with the meaning of the fields
  static constexpr std::int64_t kUnset = INT64_MIN;              // a field that this operator does not have
  static constexpr std::size_t kBytes = 1024;                    // of every protocol

  std::int64_t fields[static_cast<int>(Field::count)];  // the protocol is the first
  std::int64_t life;  // a random number of the rank's; that of rank 0 names this life of the group
  std::int64_t refused;
  char reason[256];  // why, if refused; always terminated
  char unused[kBytes - (static_cast<std::size_t>(Field::count) + 2) * sizeof(std::int64_t) - sizeof(reason)];

  CallHeader();
  void set(Field field, std::int64_t value) { fields[static_cast<int>(field)] = value; }
  void set(Field field, double value);  // its bits
  std::int64_t get(Field field) const { return fields[static_cast<int>(field)]; }
  void refuse(const std::string& text);
};
static_assert(sizeof(CallHeader) == CallHeader::kBytes && static_cast<int>(Field::protocol) == 0);

// As in "ring_forward".
std::string op_name(Op op);

// The name of a c10::ScalarType as torch's users know it ("float32"); empty for rarer ones.
std::string dtype_name(std::int64_t scalar_type);

// Hashes, the same on every machine (FNV-1a over little-endian numbers).
std::int64_t document_hash(const std::vector<std::int32_t>& bounds);
std::int64_t sizes_hash(const std::vector<std::int64_t>& sizes);

// What is wrong with a set of headers, one per rank: protocols that differ, then a refusal, else the first field on
// which two ranks differ, with all values and the ranks that have them. Every rank that looks at the same headers gets
// the same.
struct Verdict {
  std::string text;  // empty if nothing is wrong
  int rank = -1;     // that refused, or that alone has another value than all others
};

Verdict verdict(const std::vector<CallHeader>& headers);

}  // namespace ringattn
