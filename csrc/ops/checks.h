// Argument checks of the operators. Here and not in Python, so that every door (the Python functions, torch.ops,
// compiled graphs) gets them. Bad values and shapes raise ValueError, bad types TypeError; a message names the
// argument, what came and what was expected.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ring/pass.h"

namespace ringattn {

// The options that ring_forward, ring_backward and their virtual forms share, as they come from the dispatcher.
struct PassOptions {
  std::string layout;
  std::optional<std::int64_t> seq_len, key_seq_len;
  bool is_causal = false;
  std::optional<std::vector<std::int64_t>> window;
  std::optional<at::Tensor> cu_seqlens;
  std::optional<double> scale;
  bool enable_gqa = false;
  bool deterministic = true;
  std::vector<bool> needs_grad;  // query, key, value
};

PassOptions pass_options(std::string layout, std::optional<std::int64_t> seq_len,
                         std::optional<std::int64_t> key_seq_len, bool is_causal, at::OptionalIntArrayRef window,
                         const std::optional<at::Tensor>& cu_seqlens, std::optional<double> scale, bool enable_gqa,
                         bool deterministic, const c10::List<bool>& needs_grad);

// Who holds the tensors: one rank of a ring, or one process for all virtual ranks (whole tensors).
struct Holder {
  int world_size = 1;
  std::optional<int> rank;
};

Pass check_pass(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const PassOptions& options,
                const Holder& holder);

// A tensor whose last dimension has stride 1: itself, or a contiguous copy.
at::Tensor with_unit_stride(const at::Tensor& tensor);

void check_device(const at::Tensor& tensor, const char* name, const char* like_name, const at::Tensor& like);

// What backward gets from forward, against what the pass says it must be.
void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef expected);
void check_type(const at::Tensor& tensor, const char* name, at::ScalarType expected);

// A mask over positions [0, key_count); `bounds` receives the documents and must outlive the mask.
Mask check_mask(bool is_causal, const std::optional<std::vector<std::int64_t>>& window,
                const std::optional<at::Tensor>& cu_seqlens, std::int64_t key_count, std::vector<std::int32_t>& bounds);

// Finite and > 0 also in the type that the kernels compute in.
double check_scale(std::optional<double> scale, std::int64_t head_dim, at::ScalarType accumulation_type);

// "float32", for messages.
std::string type_name(at::ScalarType type);

DType check_dtype(at::ScalarType type, const char* name);
at::ScalarType scalar_type(DType dtype);

// The type of scores, statistics and sums for an input type.
at::ScalarType accumulation_type(at::ScalarType input_type);

// Runs `function`, turning the std::invalid_argument of core into a ValueError.
template <typename Function>
auto as_value_error(Function function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    C10_THROW_ERROR(ValueError, error.what());
  }
}

}  // namespace ringattn
