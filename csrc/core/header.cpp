#include "core/header.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "core/layout.h"
#include "core/mask.h"

namespace ringattn {
namespace {

using Text = std::string (*)(std::int64_t value);

std::string number(std::int64_t value) { return std::to_string(value); }
std::string yes_no(std::int64_t value) { return value != 0 ? "True" : "False"; }

std::string hexadecimal(std::int64_t value) {
  char text[24];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::string real(std::int64_t value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", std::bit_cast<double>(value));
  return text;
}

std::string window(std::int64_t value) { return value == Mask::kUnbounded ? "unbounded" : number(value); }

std::string op(std::int64_t value) {
  switch (static_cast<Op>(value)) {
    case Op::ring_forward:
      return "ring_forward";
    case Op::ring_backward:
      return "ring_backward";
    case Op::gather:
      return "gather";
    case Op::refuse:
      return "refuse";
    case Op::init:
      return "init";
  }
  return number(value);
}

std::string dtype(std::int64_t value) {
  const std::string name = dtype_name(value);
  return name.empty() ? "torch's number " + number(value) : name;
}

std::string device(std::int64_t value) {
  switch (value) {
    case 0:
      return "cpu";
    case 1:
      return "cuda";
    default:
      return "torch's number " + number(value);
  }
}

std::string layout(std::int64_t value) { return layout_name(static_cast<LayoutKind>(value)); }

std::string needs_grad(std::int64_t value) {
  std::string names;
  for (int bit = 0; const char* name : {"query", "key", "value"}) {
    if ((value >> bit++ & 1) == 0) continue;
    if (!names.empty()) names += ", ";
    names += name;
  }
  return names.empty() ? "none" : names;
}

struct Description {
  const char* name;
  Text text;
};

// In the order of Field.
constexpr Description kFields[] = {
    {"the protocol of ringattn_ext", hexadecimal},
    {"the operator", op},
    {"the call number on this group", number},
    {"dtype", dtype},
    {"the kind of device", device},
    {"layout", layout},
    {"seq_len", number},
    {"key_seq_len", number},
    {"the batch size", number},
    {"the number of query heads", number},
    {"the number of key/value heads", number},
    {"head_dim", number},
    {"is_causal", yes_no},
    {"window (left)", window},
    {"window (right)", window},
    {"the number of documents in cu_seqlens", number},
    {"the hash of cu_seqlens", hexadecimal},
    {"scale", real},
    {"deterministic", yes_no},
    {"which inputs need gradients", needs_grad},
    {"the call number of the forward pass that this is the backward pass of", number},
    {"dim", number},
    {"the number of elements before dim", number},
    {"the number of elements after dim", number},
    {"the hash of the sizes other than dim", hexadecimal},
};
static_assert(std::size(kFields) == static_cast<std::size_t>(Field::count));

std::string value_text(const CallHeader& header, int field) {
  const std::int64_t value = header.fields[field];
  return value == CallHeader::kUnset ? "none" : kFields[field].text(value);
}

template <typename Number>
std::int64_t hash_of(const std::vector<Number>& numbers) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const Number value : numbers) {
    for (std::size_t byte = 0; byte < sizeof(Number); ++byte) {
      hash = (hash ^ (static_cast<std::uint64_t>(value) >> 8 * byte & 0xff)) * 0x100000001b3;
    }
  }
  return static_cast<std::int64_t>(hash);
}

}  // namespace

// torch's numbers of its types (c10::ScalarType), which are part of its file formats and do not change.
std::string dtype_name(std::int64_t value) {
  constexpr const char* kNames[] = {"uint8",   "int8",    "int16",     "int32",     "int64",      "float16",
                                    "float32", "float64", "complex32", "complex64", "complex128", "bool"};
  if (value >= 0 && value < static_cast<std::int64_t>(std::size(kNames))) return kNames[value];
  return value == 15 ? "bfloat16" : "";
}

CallHeader::CallHeader() : refused(0) {
  std::fill(std::begin(fields), std::end(fields), kUnset);
  std::memset(reason, 0, sizeof(reason));
  set(Field::protocol, kProtocol);
}

void CallHeader::set(Field field, double value) { set(field, std::bit_cast<std::int64_t>(value)); }

void CallHeader::refuse(const std::string& text) {
  refused = 1;
  std::memset(reason, 0, sizeof(reason));
  std::size_t length = std::min(text.size(), sizeof(reason) - 1);
  // Not inside a UTF-8 character: Python could not decode the error.
  while (length > 0 && length < text.size() && (text[length] & 0xc0) == 0x80) --length;
  std::memcpy(reason, text.data(), length);
}

std::int64_t document_hash(const std::vector<std::int32_t>& bounds) { return hash_of(bounds); }
std::int64_t sizes_hash(const std::vector<std::int64_t>& sizes) { return hash_of(sizes); }

std::string verdict(const std::vector<CallHeader>& headers) {
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].refused == 0) continue;
    // The bytes came from a peer: do not rely on their terminator.
    const char* reason = headers[rank].reason;
    return "rank " + std::to_string(rank) +
           " refused: " + std::string(reason, ::strnlen(reason, sizeof(headers[rank].reason)));
  }
  for (int field = 0; field < static_cast<int>(Field::count); ++field) {
    for (std::size_t rank = 1; rank < headers.size(); ++rank) {
      if (headers[rank].fields[field] == headers[0].fields[field]) continue;
      return std::string("ranks disagree on ") + kFields[field].name + ": rank 0 has " + value_text(headers[0], field) +
             ", rank " + std::to_string(rank) + " has " + value_text(headers[rank], field);
    }
  }
  return "";
}

}  // namespace ringattn
