#include "core/header.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

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

std::string op(std::int64_t value) { return op_name(static_cast<Op>(value)); }

std::string check(std::int64_t value) {
  constexpr const char* kNames[] = {"auto", "always", "off"};
  return value >= 0 && value < 3 ? kNames[value] : number(value);
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
    {"the hash of the members of the group", hexadecimal},
    {"RINGATTN_CHECK", check},
};
static_assert(std::size(kFields) == static_cast<std::size_t>(Field::count));

std::string value_text(std::int64_t value, int field) {
  return value == CallHeader::kUnset ? "none" : kFields[field].text(value);
}

constexpr std::size_t kMaxValues = 4;  // that a text lists

// "rank 3 has " or "ranks 0-2, 5 and 7 have ".
std::string ranks_text(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (std::size_t first = 0, end = 0; first < ranks.size(); first = end) {
    while (end < ranks.size() && ranks[end] - ranks[first] == static_cast<int>(end - first)) ++end;
    if (end - first > 2) {
      parts.push_back(std::to_string(ranks[first]) + '-' + std::to_string(ranks[end - 1]));
    } else {
      for (std::size_t i = first; i < end; ++i) parts.push_back(std::to_string(ranks[i]));
    }
  }
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < parts.size(); ++i) {
    text += std::string(i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + parts[i];
  }
  return text + (ranks.size() == 1 ? " has " : " have ");
}

int lone_rank(const std::vector<int>& ranks, const std::vector<int>& others) {
  return ranks.size() == 1 ? ranks[0] : others.size() == 1 ? others[0] : -1;
}

Verdict compare(const std::vector<CallHeader>& headers, int field) {
  std::vector<std::pair<std::int64_t, std::vector<int>>> values;  // and the ranks that have them
  for (int rank = 0; rank < static_cast<int>(headers.size()); ++rank) {
    const std::int64_t value = headers[rank].fields[field];
    const auto has_it = [&](const auto& entry) { return entry.first == value; };
    const auto found = std::find_if(values.begin(), values.end(), has_it);
    if (found == values.end()) {
      values.push_back({value, {rank}});
    } else {
      found->second.push_back(rank);
    }
  }
  if (values.size() <= 1) return {};
  std::string text = std::string("ranks disagree on ") + kFields[field].name;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto& [value, ranks] = values[i];
    text += (i == 0 ? ": " : ", ") + ranks_text(ranks) + value_text(value, field);
    if (i + 1 == kMaxValues && values.size() > kMaxValues) {
      text += ", and there are " + std::to_string(values.size() - kMaxValues) + " more values";
      break;
    }
  }
  return {text, headers.size() > 2 && values.size() == 2 ? lone_rank(values[0].second, values[1].second) : -1};
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

std::string op_name(Op op) {
  switch (op) {
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
  return number(static_cast<std::int64_t>(op));
}

// torch's numbers of its types (c10::ScalarType), which are part of its file formats and do not change.
std::string dtype_name(std::int64_t value) {
  constexpr const char* kNames[] = {"uint8",   "int8",    "int16",     "int32",     "int64",      "float16",
                                    "float32", "float64", "complex32", "complex64", "complex128", "bool"};
  if (value >= 0 && value < static_cast<std::int64_t>(std::size(kNames))) return kNames[value];
  return value == 15 ? "bfloat16" : "";
}

CallHeader::CallHeader() : life(0), refused(0) {
  std::fill(std::begin(fields), std::end(fields), kUnset);
  std::memset(reason, 0, sizeof(reason));
  std::memset(unused, 0, sizeof(unused));
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

Verdict verdict(const std::vector<CallHeader>& headers) {
  // Of another protocol nothing else has a meaning here.
  if (Verdict found = compare(headers, static_cast<int>(Field::protocol)); !found.text.empty()) return found;
  for (int rank = 0; rank < static_cast<int>(headers.size()); ++rank) {
    if (headers[rank].refused == 0) continue;
    // The bytes came from a peer: do not rely on their terminator.
    const char* reason = headers[rank].reason;
    return {"rank " + std::to_string(rank) +
                " refused: " + std::string(reason, ::strnlen(reason, sizeof(headers[rank].reason))),
            rank};
  }
  for (int field = 0; field < static_cast<int>(Field::count); ++field) {
    if (Verdict found = compare(headers, field); !found.text.empty()) return found;
  }
  return {};
}

}  // namespace ringattn
