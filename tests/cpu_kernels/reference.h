// Dense attention in double over explicit positions: the reference of the kernels' tests.
#pragma once

#include <cmath>
#include <vector>

#include "tensors.h"

namespace ringattn::test {

inline std::vector<std::int32_t> positions_of(const Segments& segments) {
  std::vector<std::int32_t> positions;
  for (const Segment& segment : segments) {
    for (std::int32_t i = 0; i < segment.length; ++i) positions.push_back(segment.position(i));
  }
  return positions;
}

struct Reference {
  // [B, Hq, Sq, D] and [B, Hq, Sq]; the gradients have the shapes of their tensors. *_terms: the sums of the absolute
  // values of what is summed, against which rounding is measured.
  std::vector<double> out, lse, grad_query, grad_key, grad_value;
  std::vector<double> out_terms, lse_terms, grad_query_terms, grad_key_terms, grad_value_terms;
};

// The numbers of a tensor, [B, H, S, D].
inline std::vector<double> numbers_of(const Tensor* tensor) {
  std::vector<double> numbers;
  if (tensor == nullptr) return numbers;
  numbers.reserve(static_cast<std::size_t>(tensor->B * tensor->H * tensor->S * tensor->D));
  tensor->for_each([&](auto b, auto h, auto s, auto d) { numbers.push_back(tensor->at(b, h, s, d)); });
  return numbers;
}

inline Reference dense_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor* grad_out,
                                 const Tensor* grad_lse, const Segments& query_segments, const Segments& key_segments,
                                 const Mask& mask, double scale) {
  const std::int64_t B = query.B, Hq = query.H, Hkv = key.H, Sq = query.S, Skv = key.S, D = query.D;
  const auto query_positions = positions_of(query_segments), key_positions = positions_of(key_segments);
  const std::vector<double> queries = numbers_of(&query), keys = numbers_of(&key), values = numbers_of(&value);
  const std::vector<double> grads_out = numbers_of(grad_out), grads_lse = numbers_of(grad_lse);
  Reference r;
  r.out.assign(B * Hq * Sq * D, 0.0);
  r.lse.assign(B * Hq * Sq, -std::numeric_limits<double>::infinity());
  r.lse_terms.assign(B * Hq * Sq, 0.0);
  r.out_terms = r.grad_query = r.grad_query_terms = r.out;
  r.grad_key.assign(B * Hkv * Skv * D, 0.0);
  r.grad_value = r.grad_key_terms = r.grad_value_terms = r.grad_key;
  std::vector<double> p(Skv);
  std::vector<std::int64_t> seen;
  for (std::int64_t row = 0; row < B * Hq * Sq; ++row) {  // [B, Hq, Sq]
    const std::int64_t i = row % Sq, kv = row / Sq / (Hq / Hkv);
    const std::int32_t first = mask.first_key(query_positions[i]), last = mask.last_key(query_positions[i]);
    const double* q = queries.data() + row * D;
    double largest = -std::numeric_limits<double>::infinity(), largest_terms = 0.0;
    seen.clear();
    for (std::int64_t j = 0; j < Skv; ++j) {
      if (key_positions[j] < first || key_positions[j] > last) continue;
      seen.push_back(j);
      const double* k = keys.data() + (kv * Skv + j) * D;
      double terms = 0.0;
      p[j] = 0.0;
      for (std::int64_t d = 0; d < D; ++d) {
        p[j] += q[d] * k[d];
        terms += std::abs(q[d] * k[d]);
      }
      p[j] *= scale;
      if (p[j] > largest || std::isnan(p[j])) largest = p[j], largest_terms = terms * scale;
    }
    if (seen.empty()) continue;
    double sum = 0.0;
    for (const std::int64_t j : seen) sum += p[j] = std::exp(p[j] - largest);
    r.lse[row] = largest + std::log(sum);
    r.lse_terms[row] = largest_terms + 1.0;
    double *out = r.out.data() + row * D, *out_terms = r.out_terms.data() + row * D;
    for (const std::int64_t j : seen) {
      const double* v = values.data() + (kv * Skv + j) * D;
      p[j] /= sum;
      for (std::int64_t d = 0; d < D; ++d) {
        out[d] += p[j] * v[d];
        out_terms[d] += p[j] * std::abs(v[d]);
      }
    }
    if (!grad_out) continue;
    const double* g = grads_out.data() + row * D;
    double delta = grad_lse ? -grads_lse[row] : 0.0, delta_terms = std::abs(delta);
    for (std::int64_t d = 0; d < D; ++d) {
      delta += out[d] * g[d];
      delta_terms += std::abs(out[d] * g[d]);
    }
    double *grad_query = r.grad_query.data() + row * D, *query_terms = r.grad_query_terms.data() + row * D;
    for (const std::int64_t j : seen) {
      const std::int64_t column = (kv * Skv + j) * D;
      const double *k = keys.data() + column, *v = values.data() + column;
      double dp = 0.0, dp_terms = 0.0;
      for (std::int64_t d = 0; d < D; ++d) {
        dp += v[d] * g[d];
        dp_terms += std::abs(v[d] * g[d]);
      }
      const double ds = p[j] * (dp - delta) * scale, terms = p[j] * (dp_terms + delta_terms) * scale;
      for (std::int64_t d = 0; d < D; ++d) {
        grad_query[d] += ds * k[d];
        query_terms[d] += terms * std::abs(k[d]);
        r.grad_key[column + d] += ds * q[d];
        r.grad_key_terms[column + d] += terms * std::abs(q[d]);
        r.grad_value[column + d] += p[j] * g[d];
        r.grad_value_terms[column + d] += p[j] * std::abs(g[d]);
      }
    }
  }
  return r;
}

// How far off numbers may be that are so small that their type has no more digits. Sums in A have many such steps;
// those of products of bfloat16 pairs are 0 below 2^-126, which is how the instruction is defined, and
// gradients multiply that by rows of the inputs.
inline double smallest_step(DType stored, DType inputs) {
  if (inputs == DType::bfloat16) return stored == DType::bfloat16 ? 0x1p-125 : 0x1p-105;
  return stored == DType::float64 ? 100 * 0x1p-1074 : stored == DType::float16 ? 0x1p-24 : 100 * 0x1p-149;
}

// The norm of the error over the norm of the reference, or of the sums of its terms where they are given; infinite if
// one has a NaN where the other has none. Differences up to `step` do not count.
inline double relative_error(const Tensor& actual, const std::vector<double>& expected,
                             const std::vector<double>* terms = nullptr, double step = 0.0) {
  double error = 0.0, size = 0.0;
  std::size_t index = 0;
  actual.for_each([&](auto b, auto h, auto s, auto d) {
    const double x = actual.at(b, h, s, d), y = expected[index++];
    if (std::isnan(x) && std::isnan(y)) return;
    const double difference = std::isnan(x) || std::isnan(y) ? std::numeric_limits<double>::infinity() : x - y;
    if (x != y && std::abs(difference) > step) error += difference * difference;  // infinities may be equal
  });
  if (error == 0.0) return 0.0;
  for (const double t : terms ? *terms : expected) size += std::isfinite(t) ? t * t : 0.0;
  return std::sqrt(error / size);
}

}  // namespace ringattn::test
