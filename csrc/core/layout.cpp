#include "core/layout.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace ringattn {

LayoutKind parse_layout(std::string_view name) {
  if (name == "contiguous") return LayoutKind::contiguous;
  if (name == "zigzag") return LayoutKind::zigzag;
  if (name == "striped") return LayoutKind::striped;
  throw std::invalid_argument("layout: expected 'contiguous', 'zigzag' or 'striped', got '" + std::string(name) + "'");
}

const char* layout_name(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::contiguous:
      return "contiguous";
    case LayoutKind::zigzag:
      return "zigzag";
    case LayoutKind::striped:
      return "striped";
  }
  return "unknown";
}

Layout::Layout(LayoutKind kind, std::int64_t world_size, std::int64_t seq_len) : kind_(kind) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (world_size < 1 || world_size > kMax / 2) {
    throw std::invalid_argument("world_size: expected a number from 1 to 2^30 - 1, got " + std::to_string(world_size));
  }
  if (seq_len < 0 || seq_len > kMax) {
    throw std::invalid_argument("seq_len: expected a number from 0 to 2^31 - 1, got " + std::to_string(seq_len));
  }
  world_size_ = static_cast<std::int32_t>(world_size);
  seq_len_ = static_cast<std::int32_t>(seq_len);
}

std::int32_t Layout::chunk_start(std::int64_t chunk, std::int64_t chunks) const {
  return static_cast<std::int32_t>(chunk * seq_len_ / chunks);
}

Segments Layout::segments(std::int64_t rank) const {
  if (rank < 0 || rank >= world_size_) {
    throw std::invalid_argument("rank: expected a number from 0 to " + std::to_string(world_size_ - 1) + ", got " +
                                std::to_string(rank));
  }
  Segments result;
  const auto add = [&result](std::int32_t start, std::int32_t stride, std::int32_t length) {
    if (length > 0) result.items[result.count++] = {start, stride, length};
  };
  const auto add_chunk = [&](std::int64_t chunk, std::int64_t chunks) {
    const std::int32_t start = chunk_start(chunk, chunks);
    add(start, 1, chunk_start(chunk + 1, chunks) - start);
  };
  const std::int64_t P = world_size_;
  if (P == 1) {
    add(0, 1, seq_len_);
  } else if (kind_ == LayoutKind::contiguous) {
    add_chunk(rank, P);
  } else if (kind_ == LayoutKind::zigzag) {
    add_chunk(rank, 2 * P);
    add_chunk(2 * P - 1 - rank, 2 * P);
  } else {
    add(static_cast<std::int32_t>(rank), world_size_,
        rank < seq_len_ ? static_cast<std::int32_t>((seq_len_ - rank + P - 1) / P) : 0);
  }
  return result;
}

std::int64_t Layout::capacity() const {
  const std::int64_t pieces = kind_ == LayoutKind::zigzag ? 2 : 1;
  const std::int64_t chunks = pieces * world_size_;
  return pieces * ((seq_len_ + chunks - 1) / chunks);
}

}  // namespace ringattn
