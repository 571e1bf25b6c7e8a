#include "ops/checks.h"

#include <ATen/Functions.h>

#include <cmath>
#include <limits>

#include "ops/device.h"

namespace ringattn {
namespace {

std::string shape_text(at::IntArrayRef shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void check_dimensions(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 4, name, ": expected 4 dimensions [B, H, S, D], got ", tensor.dim(), " (shape ",
                    shape_text(tensor.sizes()), ")");
}

void check_same(const at::Tensor& tensor, const char* name, const at::Tensor& query) {
  check_device(tensor, name, "query", query);
  TORCH_CHECK_TYPE(tensor.scalar_type() == query.scalar_type(), name, ": expected the dtype of query, ",
                   type_name(query.scalar_type()), ", got ", type_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.size(0) == query.size(0), name, ": expected the batch size of query, ", query.size(0),
                    ", got ", tensor.size(0));
  TORCH_CHECK_VALUE(tensor.size(3) == query.size(3), name, ": expected the head_dim of query, ", query.size(3),
                    ", got ", tensor.size(3));
}

void check_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, bool enable_gqa) {
  const std::int64_t Hq = query.size(1), Hkv = key.size(1), D = query.size(3);
  TORCH_CHECK_VALUE(value.size(1) == Hkv, "value: expected as many heads as key, ", Hkv, ", got ", value.size(1));
  TORCH_CHECK_VALUE(value.size(2) == key.size(2), "value: expected as many tokens as key, ", key.size(2), ", got ",
                    value.size(2));
  TORCH_CHECK_VALUE(Hq > 0, "query: expected at least one head, got 0");
  TORCH_CHECK_VALUE(Hkv > 0, "key: expected at least one head, got 0");
  TORCH_CHECK_VALUE(Hq % Hkv == 0, "query: expected a number of heads that is a multiple of the ", Hkv,
                    " heads of key and value, got ", Hq);
  TORCH_CHECK_VALUE(enable_gqa || Hq == Hkv, "enable_gqa: expected True for ", Hq, " query heads over ", Hkv,
                    " key/value heads, got False");
  TORCH_CHECK_VALUE(D >= 1 && D <= 256, "query: expected a head_dim from 1 to 256, got ", D);
}

// The global length of an axis of which this rank holds `local` tokens.
Layout check_layout(const char* tensor, const char* argument, LayoutKind kind, std::optional<std::int64_t> seq_len,
                    std::int64_t local, const Holder& holder) {
  const std::int64_t total = seq_len.value_or(holder.rank ? local * holder.world_size : local);
  TORCH_CHECK_VALUE(total >= 0 && total <= std::numeric_limits<std::int32_t>::max(), argument,
                    ": expected a number from 0 to 2^31 - 1, got ", total);
  const Layout layout = as_value_error([&] { return Layout(kind, holder.world_size, total); });
  if (holder.rank) {
    const std::int64_t expected = layout.length(*holder.rank);
    TORCH_CHECK_VALUE(local == expected, tensor, ": expected ", expected, " tokens on rank ", *holder.rank, " of ",
                      holder.world_size, " (layout '", layout_name(kind), "', ", argument, " ", total, "), got ",
                      local);
  } else {
    TORCH_CHECK_VALUE(local == total, tensor, ": expected the whole sequence of ", total, " tokens, got ", local);
  }
  return layout;
}

std::vector<std::int32_t> check_documents(const at::Tensor& cu_seqlens, std::int64_t key_count) {
  TORCH_CHECK_TYPE(cu_seqlens.scalar_type() == at::kInt || cu_seqlens.scalar_type() == at::kLong,
                   "cu_seqlens: expected dtype int32 or int64, got ", type_name(cu_seqlens.scalar_type()));
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1 && cu_seqlens.numel() >= 1,
                    "cu_seqlens: expected one dimension with at least one entry, got shape ",
                    shape_text(cu_seqlens.sizes()));
  TORCH_CHECK_VALUE(capture_on(cu_seqlens.device()) == 0,
                    "cu_seqlens: expected a CPU tensor while a graph is captured, ", "got one on ", cu_seqlens.device(),
                    ", whose numbers the host would have to wait for");
  const at::Tensor host = cu_seqlens.to(at::kCPU, at::kLong).contiguous();
  const std::int64_t* bounds = host.const_data_ptr<std::int64_t>();
  const std::int64_t count = host.numel();
  TORCH_CHECK_VALUE(bounds[0] == 0, "cu_seqlens: expected 0 as the first entry, got ", bounds[0]);
  for (std::int64_t i = 1; i < count; ++i) {
    TORCH_CHECK_VALUE(bounds[i] >= bounds[i - 1], "cu_seqlens: expected entries that do not decrease, got ", bounds[i],
                      " after ", bounds[i - 1], " at index ", i);
  }
  TORCH_CHECK_VALUE(bounds[count - 1] == key_count, "cu_seqlens: expected seq_len, ", key_count,
                    ", as the last entry, got ", bounds[count - 1]);
  return std::vector<std::int32_t>(bounds, bounds + count);
}

}  // namespace

std::string type_name(at::ScalarType type) {
  const std::string name = dtype_name(static_cast<int>(type));
  return name.empty() ? c10::toString(type) : name;
}

DType check_dtype(at::ScalarType type, const char* name) {
  switch (type) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kHalf:
      return DType::float16;
    default:
      C10_THROW_ERROR(TypeError,
                      c10::str(name, ": expected dtype float64, float32, bfloat16 or float16, got ", type_name(type)));
  }
}

at::ScalarType scalar_type(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return at::kDouble;
    case DType::float32:
      return at::kFloat;
    case DType::bfloat16:
      return at::kBFloat16;
    case DType::float16:
      return at::kHalf;
  }
  return at::ScalarType::Undefined;
}

double check_scale(std::optional<double> scale, std::int64_t head_dim, at::ScalarType accumulation_type) {
  const double value = scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const auto usable = [](double number) { return std::isfinite(number) && number > 0; };
  TORCH_CHECK_VALUE(usable(value), "scale: expected a finite number above 0, got ", value);
  TORCH_CHECK_VALUE(accumulation_type == at::kDouble || usable(static_cast<float>(value)),
                    "scale: expected a finite number above 0 in float32, got ", value);
  return value;
}

Mask check_mask(bool is_causal, const std::optional<std::vector<std::int64_t>>& window,
                const std::optional<at::Tensor>& cu_seqlens, std::int64_t key_count,
                std::vector<std::int32_t>& bounds) {
  Mask mask;
  mask.key_count = static_cast<std::int32_t>(key_count);
  if (window) {
    TORCH_CHECK_VALUE(window->size() == 2, "window: expected (left, right), got ", window->size(), " entries");
    const auto side = [](std::int64_t tokens, const char* name) {
      TORCH_CHECK_VALUE(tokens >= -1, "window: expected ", name, " >= -1 (-1: unbounded), got ", tokens);
      return tokens == -1 || tokens > Mask::kUnbounded ? Mask::kUnbounded : static_cast<std::int32_t>(tokens);
    };
    mask.left = side((*window)[0], "left");
    mask.right = side((*window)[1], "right");
  }
  if (is_causal) mask.right = 0;
  if (cu_seqlens) {
    bounds = check_documents(*cu_seqlens, key_count);
    if (key_count > 0) {  // a sequence without tokens has no document to look up
      mask.document_bounds = bounds.data();
      mask.document_count = static_cast<std::int32_t>(bounds.size()) - 1;
    }
  }
  return mask;
}

Pass check_pass(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const PassOptions& options,
                const Holder& holder) {
  Pass pass;
  pass.dtype = check_dtype(query.scalar_type(), "query");
  pass.input_type = query.scalar_type();
  pass.accumulation_type = accumulation_type(pass.input_type);
  check_dimensions(query, "query");
  check_dimensions(key, "key");
  check_dimensions(value, "value");
  check_same(key, "key", query);
  check_same(value, "value", query);
  check_heads(query, key, value, options.enable_gqa);
  pass.B = query.size(0);
  pass.Hq = query.size(1);
  pass.Hkv = key.size(1);
  pass.D = query.size(3);

  const LayoutKind kind = as_value_error([&] { return parse_layout(options.layout); });
  // Without a length of their own, keys have the length of the queries; if they are as many here, that is.
  std::optional<std::int64_t> key_seq_len = options.key_seq_len;
  if (!key_seq_len && key.size(2) == query.size(2)) key_seq_len = options.seq_len;
  pass.query_layout = check_layout("query", "seq_len", kind, options.seq_len, query.size(2), holder);
  pass.key_layout = check_layout("key", "key_seq_len", kind, key_seq_len, key.size(2), holder);

  const bool full = !options.is_causal && !options.window && !options.cu_seqlens;
  TORCH_CHECK_VALUE(
      full || pass.query_layout.seq_len() == pass.key_layout.seq_len(),
      "is_causal, window, cu_seqlens: expected none of them for queries and keys of unequal lengths, seq_len ",
      pass.query_layout.seq_len(), " and key_seq_len ", pass.key_layout.seq_len(),
      ": cross attention has the full mask only");
  pass.mask = check_mask(options.is_causal, options.window, options.cu_seqlens, pass.key_layout.seq_len(),
                         pass.document_bounds);
  pass.is_causal = options.is_causal;
  pass.scale = check_scale(options.scale, pass.D, pass.accumulation_type);
  pass.deterministic = options.deterministic;
  TORCH_CHECK_VALUE(options.needs_grad.size() == 3, "needs_grad: expected 3 flags (query, key, value), got ",
                    options.needs_grad.size());
  pass.needs_grad_query = options.needs_grad[0];
  pass.needs_grad_key = options.needs_grad[1];
  pass.needs_grad_value = options.needs_grad[2];
  return pass;
}

at::ScalarType accumulation_type(at::ScalarType input_type) {
  return input_type == at::kDouble ? at::kDouble : at::kFloat;
}

PassOptions pass_options(std::string layout, std::optional<std::int64_t> seq_len,
                         std::optional<std::int64_t> key_seq_len, bool is_causal, at::OptionalIntArrayRef window,
                         const std::optional<at::Tensor>& cu_seqlens, std::optional<double> scale, bool enable_gqa,
                         bool deterministic, const c10::List<bool>& needs_grad) {
  PassOptions options;
  options.layout = std::move(layout);
  options.seq_len = seq_len;
  options.key_seq_len = key_seq_len;
  options.is_causal = is_causal;
  if (window) options.window = window->vec();
  options.cu_seqlens = cu_seqlens;
  options.scale = scale;
  options.enable_gqa = enable_gqa;
  options.deterministic = deterministic;
  options.needs_grad = {needs_grad.begin(), needs_grad.end()};
  return options;
}

at::Tensor with_unit_stride(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

void check_device(const at::Tensor& tensor, const char* name, const char* like_name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device() == like.device(), name, ": expected the device of ", like_name, ", ", like.device(),
                    ", got ", tensor.device());
}

void check_shape(const at::Tensor& tensor, const char* name, at::IntArrayRef expected) {
  TORCH_CHECK_VALUE(tensor.sizes() == expected, name, ": expected shape ", shape_text(expected), ", got ",
                    shape_text(tensor.sizes()));
}

void check_type(const at::Tensor& tensor, const char* name, at::ScalarType expected) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == expected, name, ": expected dtype ", type_name(expected), ", got ",
                   type_name(tensor.scalar_type()));
}

}  // namespace ringattn
