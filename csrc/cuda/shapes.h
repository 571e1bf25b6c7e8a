// Tile shapes as data: what a thread block works on, by architecture, head_dim and kernel. Read by the kernels when
// they are compiled and by the launch plan when they are launched; printed by `python -m ringattn_ext shapes`.
//
// 32 rows per warp (two m16 tiles) halve the shared memory that a product reads, which binds where the tensor core is
// fast; 16 rows need fewer registers, which are scarce at head_dim 256 and in backward.
#pragma once

namespace ringattn::cuda {

enum class Kernel { forward, backward_keys, backward_queries };

struct Shape {
  int queries;                 // of a tile
  int keys;                    // of a tile
  int score_columns;           // of the keys, or of the queries in backward_keys: scores that a warp holds at a time
  int warps;                   // of a thread block
  int tiles_per_warp;          // m16 tiles of the rows that a warp owns: queries, or keys in backward_keys
  int column_warps;            // warps that share those rows, each with its part of the head_dim
  int stages;                  // buffers of the operand that is loaded ahead
  int blocks;                  // thread blocks that fit a multiprocessor
  bool keeps_sources = false;  // where a thread reads keys and values: in its registers, not in shared memory

  constexpr int threads() const { return 32 * warps; }
};

// The small kernels (finalize, merge, delta, cast): lanes that share a row of [S, D], and threads of a thread block.
inline constexpr int kLanesPerRow = 8;
inline constexpr int kSmallKernelThreads = 256;

// The largest head_dim that a compiled tile serves; smaller ones are padded with zeros.
inline constexpr int kHeadDims[] = {64, 128, 256};

constexpr int padded_head_dim(long head_dim) {
  for (const int tile : kHeadDims) {
    if (head_dim <= tile) return tile;
  }
  return 0;
}

// Parts with 99 KiB of shared memory for a thread block, instead of 163 KiB or more.
constexpr bool has_small_shared_memory(int arch) { return arch == 86 || arch == 89 || arch == 120 || arch == 121; }

constexpr int shared_limit(int arch) { return (has_small_shared_memory(arch) ? 99 : arch >= 90 ? 227 : 163) * 1024; }

constexpr Shape shape_of(Kernel kernel, int arch, int head_dim) {
  const bool small = has_small_shared_memory(arch);
  switch (kernel) {
    case Kernel::forward:
      if (head_dim == 64) return small ? Shape{128, 64, 64, 4, 2, 1, 1, 2} : Shape{128, 128, 64, 4, 2, 1, 1, 2};
      if (head_dim == 128) {  // from sm_90 on the compiler spills in the loop over two parts of a key tile
        return small || arch >= 90 ? Shape{128, 32, 32, 4, 2, 1, 1, 2, true} : Shape{128, 64, 32, 4, 2, 1, 1, 2};
      }
      return small ? Shape{64, 64, 64, 4, 1, 1, 1, 1} : Shape{128, 64, 64, 8, 1, 1, 1, 1};
    case Kernel::backward_keys:
      if (head_dim == 256) return small ? Shape{32, 32, 16, 4, 1, 2, 1, 1} : Shape{64, 64, 32, 8, 1, 2, 1, 1};
      if (head_dim == 128) return small ? Shape{64, 64, 32, 4, 1, 1, 1, 1} : Shape{64, 128, 32, 8, 1, 1, 2, 1};
      return {64, 128, 64, 8, 1, 1, 2, 1};
    case Kernel::backward_queries:
      if (head_dim == 256) return small ? Shape{64, 16, 16, 4, 1, 1, 2, 1} : Shape{64, 32, 32, 4, 1, 1, 2, 1};
      if (small) return head_dim == 64 ? Shape{64, 64, 64, 4, 1, 1, 2, 2, true} : Shape{64, 64, 64, 4, 1, 1, 2, 1};
      return {128, 64, 64, 8, 1, 1, 2, 1};
  }
  return {};
}

// Bytes of shared memory that a thread block takes. The kernels lay it out and assert that they need no more.
constexpr int shared_bytes_of(Kernel kernel, const Shape& shape, int head_dim, bool adds_queries = false) {
  const int query_tile = shape.queries * head_dim * 2, key_tile = shape.keys * head_dim * 2;
  switch (kernel) {
    case Kernel::forward:  // q, k, v; the interval of every row; two pointers of every thread
      return query_tile + 2 * key_tile + shape.queries * 8 + (shape.keeps_sources ? 0 : shape.threads() * 16);
    case Kernel::backward_keys: {
      // k, v; the stages of q, dO and the statistics of their rows, in a page; p and ds where warps share rows, ds
      // where dQ is added, whose rows take a panel each; four pointers of every thread.
      const int product = shape.keys * (shape.queries < 64 ? 64 : shape.queries) * 2;
      const int products = shape.column_warps > 1 ? 2 * product : adds_queries ? product : 0;
      return 2 * key_tile + shape.stages * (2 * query_tile + 1024) + products + shape.threads() * 32;
    }
    case Kernel::backward_queries:  // q, dO; the stages of k and v; the interval of every row; two pointers of every
                                    // thread
      return 2 * query_tile + shape.stages * 2 * key_tile + shape.queries * 8 +
             (shape.keeps_sources ? 0 : shape.threads() * 16);
  }
  return 0;
}

}  // namespace ringattn::cuda
