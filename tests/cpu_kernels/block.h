// One call of the kernels with everything it needs, for tests.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <thread>

#include "cpu/kernels.h"
#include "tensors.h"

namespace ringattn::test {

struct Block;

struct Shape {
  DType dtype = DType::float32;
  std::int64_t B = 1, Hq = 1, Hkv = 1, D = 64;
  Segments query_segments, key_segments;
  Mask mask;
  Memory memory = Memory::contiguous;                        // of query, key, value; of results, unless strides are 0
  std::optional<Memory> key_memory = {}, value_memory = {};  // where they differ
  Memory grad_memory = Memory::contiguous;                   // of grad_out
  double scale = 1.0;
  bool has_grad_lse = true;
  std::function<void(Block&)> prepare = {};  // changes the inputs; may be empty
  double largest_score = 0.0;  // of unusually large ones, before scaling: what their terms are rounded to counts
};

inline Launch serial() { return {}; }

inline Launch threads(int count) {
  return {[count](std::int64_t tasks, const std::function<void(std::int64_t)>& task) {
            std::atomic<std::int64_t> next{0};
            std::vector<std::thread> workers;
            for (int i = 0; i < count; ++i) {
              workers.emplace_back([&] {
                for (std::int64_t t = next++; t < tasks; t = next++) task(t);
              });
            }
            for (std::thread& worker : workers) worker.join();
          },
          nullptr};
}

// The first `count` tokens, and those behind them.
inline Segments first_of(const Segments& segments, std::int32_t count) {
  Segments result;
  for (const Segment& segment : segments) {
    const std::int32_t taken = std::min(segment.length, count);
    if (taken > 0) result.items[result.count++] = segment.part(0, taken);
    count -= taken;
  }
  return result;
}

inline Segments rest_of(const Segments& segments, std::int32_t count) {
  Segments result;
  for (const Segment& segment : segments) {
    const std::int32_t dropped = std::min(segment.length, count);
    if (dropped < segment.length) result.items[result.count++] = segment.part(dropped, segment.length - dropped);
    count -= dropped;
  }
  return result;
}

// Inputs, state, results and gradients of a shape; outputs start as NaN, gradients as 0.
struct Block {
  Shape shape;
  std::int64_t Sq = shape.query_segments.length(), Skv = shape.key_segments.length();
  DType A = accumulator_of(shape.dtype);
  Tensor query{shape.dtype, shape.B, shape.Hq, Sq, shape.D, shape.memory};
  Tensor key{shape.dtype, shape.B, shape.Hkv, Skv, shape.D, shape.key_memory.value_or(shape.memory)};
  Tensor value{shape.dtype, shape.B, shape.Hkv, Skv, shape.D, shape.value_memory.value_or(shape.memory)};
  Tensor out{shape.dtype, shape.B, shape.Hq, Sq, shape.D, result_memory()};
  Tensor grad_out{shape.dtype, shape.B, shape.Hq, Sq, shape.D, shape.grad_memory};
  Tensor o{A, shape.B, shape.Hq, Sq, shape.D, Memory::contiguous};
  Tensor m{A, shape.B, shape.Hq, Sq, 1, Memory::contiguous};
  Tensor l{A, shape.B, shape.Hq, Sq, 1, Memory::contiguous};
  Tensor lse{A, shape.B, shape.Hq, Sq, 1, Memory::contiguous};
  Tensor grad_lse{A, shape.B, shape.Hq, Sq, 1, Memory::contiguous};
  Tensor delta{A, shape.B, shape.Hq, Sq, 1, Memory::contiguous};
  Tensor grad_query{A, shape.B, shape.Hq, Sq, shape.D, result_memory()};
  Tensor grad_key{A, shape.B, shape.Hkv, Skv, shape.D, result_memory()};
  Tensor grad_value{A, shape.B, shape.Hkv, Skv, shape.D, result_memory()};

  Block(const Shape& shape, std::uint64_t seed) : shape(shape) {
    std::mt19937_64 random(seed);
    for (Tensor* tensor : {&query, &key, &value, &grad_out, &grad_lse}) tensor->fill_normal(random);
    for (Tensor* tensor : {&grad_query, &grad_key, &grad_value}) tensor->fill(0.0);
    if (shape.prepare) shape.prepare(*this);
  }

  Memory result_memory() const {
    const bool overlaps = shape.memory == Memory::expanded || shape.memory == Memory::shared;
    return overlaps ? Memory::contiguous : shape.memory;
  }

  BlockArgs args() {
    BlockArgs args;
    args.dtype = shape.dtype;
    args.B = shape.B, args.Hq = shape.Hq, args.Hkv = shape.Hkv, args.Sq = Sq, args.Skv = Skv, args.D = shape.D;
    args.scale = shape.scale;
    args.query_segments = shape.query_segments, args.key_segments = shape.key_segments;
    args.mask = shape.mask;
    args.query = query.rows, args.key = key.rows, args.value = value.rows;
    args.o = o.rows.data, args.m = m.rows.data, args.l = l.rows.data;
    args.out = out.rows, args.lse = lse.rows.data;
    args.grad_out = grad_out.rows, args.grad_lse = shape.has_grad_lse ? grad_lse.rows.data : nullptr,
    args.delta = delta.rows.data;
    args.grad_query = grad_query.rows, args.grad_key = grad_key.rows, args.grad_value = grad_value.rows;
    return args;
  }

  void forward(const Launch& launch = serial()) {
    BlockArgs call = args();
    call.finalize = call.store_state = true;
    cpu::kernels().forward(call, launch);
  }

  void backward(const Launch& launch = serial()) {
    cpu::kernels().delta(args(), launch);
    cpu::kernels().backward(args(), launch);
  }
};

inline bool same_bits(const Tensor& a, const Tensor& b) { return a.bytes == b.bytes; }

}  // namespace ringattn::test
