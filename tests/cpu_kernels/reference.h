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
  std::vector<double> lse_terms, grad_query_terms, grad_key_terms, grad_value_terms;
};

inline Reference dense_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor* grad_out,
                                 const Tensor* grad_lse, const Segments& query_segments, const Segments& key_segments,
                                 const Mask& mask, double scale) {
  const std::int64_t B = query.B, Hq = query.H, Hkv = key.H, Sq = query.S, Skv = key.S, D = query.D;
  const auto query_positions = positions_of(query_segments), key_positions = positions_of(key_segments);
  Reference r;
  r.out.assign(B * Hq * Sq * D, 0.0);
  r.lse.assign(B * Hq * Sq, -std::numeric_limits<double>::infinity());
  r.lse_terms.assign(B * Hq * Sq, 0.0);
  r.grad_query = r.grad_query_terms = r.out;
  r.grad_key.assign(B * Hkv * Skv * D, 0.0);
  r.grad_value = r.grad_key_terms = r.grad_value_terms = r.grad_key;
  std::vector<double> p(Skv);
  for (std::int64_t b = 0; b < B; ++b) {
    for (std::int64_t h = 0; h < Hq; ++h) {
      const std::int64_t kv = h / (Hq / Hkv);
      for (std::int64_t i = 0; i < Sq; ++i) {
        const std::int32_t first = mask.first_key(query_positions[i]), last = mask.last_key(query_positions[i]);
        std::vector<std::int64_t> seen;
        double largest = -std::numeric_limits<double>::infinity();
        for (std::int64_t j = 0; j < Skv; ++j) {
          if (key_positions[j] < first || key_positions[j] > last) continue;
          seen.push_back(j);
          p[j] = 0.0;
          for (std::int64_t d = 0; d < D; ++d) p[j] += query.at(b, h, i, d) * key.at(b, kv, j, d);
          p[j] *= scale;
          if (p[j] > largest || std::isnan(p[j])) largest = p[j];
        }
        if (seen.empty()) continue;
        const std::int64_t row = (b * Hq + h) * Sq + i;
        double sum = 0.0, delta = 0.0, delta_terms = 0.0;
        for (const std::int64_t j : seen) sum += p[j] = std::exp(p[j] - largest);
        for (const std::int64_t j : seen) p[j] /= sum;
        r.lse[row] = largest + std::log(sum);
        r.lse_terms[row] = std::abs(largest) + 1.0;
        for (std::int64_t d = 0; d < D; ++d) {
          for (const std::int64_t j : seen) r.out[row * D + d] += p[j] * value.at(b, kv, j, d);
          if (!grad_out) continue;
          delta += r.out[row * D + d] * grad_out->at(b, h, i, d);
          delta_terms += std::abs(r.out[row * D + d] * grad_out->at(b, h, i, d));
        }
        if (!grad_out) continue;
        if (grad_lse) delta -= grad_lse->at(b, h, i, 0);
        if (grad_lse) delta_terms += std::abs(grad_lse->at(b, h, i, 0));
        for (const std::int64_t j : seen) {
          const std::int64_t column = ((b * Hkv + kv) * Skv + j) * D;
          double dp = 0.0, dp_terms = 0.0;
          for (std::int64_t d = 0; d < D; ++d) {
            const double term = value.at(b, kv, j, d) * grad_out->at(b, h, i, d);
            dp += term;
            dp_terms += std::abs(term);
          }
          const double ds = p[j] * (dp - delta) * scale, terms = p[j] * (dp_terms + delta_terms) * scale;
          for (std::int64_t d = 0; d < D; ++d) {
            const double q = query.at(b, h, i, d), k = key.at(b, kv, j, d), g = grad_out->at(b, h, i, d);
            r.grad_query[row * D + d] += ds * k;
            r.grad_query_terms[row * D + d] += terms * std::abs(k);
            r.grad_key[column + d] += ds * q;
            r.grad_key_terms[column + d] += terms * std::abs(q);
            r.grad_value[column + d] += p[j] * g;
            r.grad_value_terms[column + d] += p[j] * std::abs(g);
          }
        }
      }
    }
  }
  return r;
}

// The norm of the error over the norm of the reference, or of the sums of its terms where they are given.
inline double relative_error(const Tensor& actual, const std::vector<double>& expected,
                             const std::vector<double>* terms = nullptr) {
  double error = 0.0, size = 0.0;
  std::size_t index = 0;
  actual.for_each([&](auto b, auto h, auto s, auto d) {
    const double x = actual.at(b, h, s, d), y = expected[index++];
    if (x != y) error += (x - y) * (x - y);  // infinities may be equal
  });
  if (error == 0.0) return 0.0;
  for (const double t : terms ? *terms : expected) size += std::isfinite(t) ? t * t : 0.0;
  return std::sqrt(error / size);
}

}  // namespace ringattn::test
