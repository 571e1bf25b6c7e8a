// Layouts: which global tokens each rank owns.
//
//   contiguous   rank i owns chunk i of P
//   zigzag       rank i owns chunks i and 2P-1-i of 2P: under a causal mask every rank has the same work
//   striped      rank i owns the tokens i, i+P, i+2P, …
//
// Chunk c of C holds the positions [floor(c*N/C), floor((c+1)*N/C)), so every length N works; ranks may own different
// numbers of tokens, or none. In a ring of one every layout is the whole sequence as one segment.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/segment.h"

namespace ringattn {

enum class LayoutKind : std::int32_t { contiguous, zigzag, striped };

LayoutKind parse_layout(std::string_view name);  // throws std::invalid_argument
const char* layout_name(LayoutKind kind);

class Layout {
 public:
  // Throws std::invalid_argument unless 1 <= world_size and 0 <= seq_len < 2^31.
  Layout(LayoutKind kind, std::int64_t world_size, std::int64_t seq_len);

  LayoutKind kind() const { return kind_; }
  std::int32_t world_size() const { return world_size_; }
  std::int32_t seq_len() const { return seq_len_; }

  // The tokens of one rank in its local order. Throws std::invalid_argument unless 0 <= rank < world_size.
  Segments segments(std::int64_t rank) const;

  // The number of tokens of one rank.
  std::int32_t length(std::int64_t rank) const { return segments(rank).length(); }

  // No rank owns more tokens than this: pieces * ceil(N / (pieces * P)), where a rank owns that many pieces.
  std::int64_t capacity() const;

 private:
  std::int32_t chunk_start(std::int64_t chunk, std::int64_t chunks) const;

  LayoutKind kind_;
  std::int32_t world_size_;
  std::int32_t seq_len_;
};

}  // namespace ringattn
