// The local building blocks: one block, one state, no ring.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "ops/checks.h"
#include "ops/device.h"

namespace ringattn {
namespace {

Segments check_segments(at::IntArrayRef numbers, const char* name, std::int64_t tokens, std::int64_t seq_len) {
  TORCH_CHECK_VALUE(numbers.size() % 3 == 0 && numbers.size() / 3 <= kMaxSegments, name,
                    ": expected start, stride, length of at most ", kMaxSegments, " segments, got ", numbers.size(),
                    " numbers");
  Segments segments;
  std::int64_t total = 0;
  for (std::size_t i = 0; i < numbers.size(); i += 3) {
    const std::int64_t start = numbers[i], stride = numbers[i + 1], length = numbers[i + 2];
    // No sum here can overflow: start < seq_len < 2^31, and the last position is compared by a division.
    const bool inside = start >= 0 && start < std::max<std::int64_t>(seq_len, 1) && stride > 0 && stride <= INT32_MAX &&
                        length >= 0 && (length <= 1 || length - 1 <= (seq_len - 1 - start) / stride) &&
                        (length == 0 || start < seq_len);
    TORCH_CHECK_VALUE(inside, name, ": expected positions from 0 to ", seq_len - 1, ", got start ", start, ", stride ",
                      stride, ", length ", length);
    total += length;
    if (length == 0) continue;
    segments.items[segments.count++] = {static_cast<std::int32_t>(start), static_cast<std::int32_t>(stride),
                                        static_cast<std::int32_t>(length)};
  }
  TORCH_CHECK_VALUE(total == tokens, name, ": expected lengths that sum to ", tokens, ", got ", total);
  return segments;
}

struct BlockOptions {
  at::IntArrayRef query_segments, key_segments;
  std::int64_t key_seq_len;
  bool is_causal;
  at::OptionalIntArrayRef window;
  const std::optional<at::Tensor>& cu_seqlens;
  std::optional<double> scale;
};

// Sizes, positions, mask and scale of a block. `bounds` must outlive the arguments.
BlockArgs check_block(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const BlockOptions& options, std::vector<std::int32_t>& bounds) {
  PassOptions pass_options;
  pass_options.layout = "contiguous";
  pass_options.scale = options.scale;
  pass_options.enable_gqa = true;
  pass_options.needs_grad = {false, false, false};
  const Pass pass = check_pass(query, key, value, pass_options, {1, std::nullopt});
  TORCH_CHECK_VALUE(options.key_seq_len >= key.size(2) && options.key_seq_len <= INT32_MAX,
                    "key_seq_len: expected a number from ", key.size(2), " to 2^31 - 1, got ", options.key_seq_len);
  BlockArgs args = pass.block_args(0);
  // Queries of cross attention may lie anywhere; with any other mask they share the positions of the keys.
  const bool full = !options.is_causal && !options.window && !options.cu_seqlens;
  args.query_segments =
      check_segments(options.query_segments, "query_segments", query.size(2), full ? INT32_MAX : options.key_seq_len);
  args.Skv = key.size(2);
  args.key_segments = check_segments(options.key_segments, "key_segments", key.size(2), options.key_seq_len);
  const auto window = options.window ? std::optional(options.window->vec()) : std::nullopt;
  args.mask = check_mask(options.is_causal, window, options.cu_seqlens, options.key_seq_len, bounds);
  return args;
}

void check_contiguous(const at::Tensor& tensor, const char* name, at::IntArrayRef shape, at::ScalarType type,
                      const at::Tensor& like) {
  check_device(tensor, name, "the others", like);
  check_shape(tensor, name, shape);
  check_type(tensor, name, type);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": expected a contiguous tensor");
}

// Kernels, the device made current, and the documents where the kernels read them.
struct Place {
  Place(at::Device where, const char* name, DType dtype, std::int64_t head_dim)
      : device(kernels_for(where, name, dtype, head_dim)), guard(where) {}

  void put_documents(BlockArgs& args, at::Device where, const std::vector<std::int32_t>& bounds) {
    documents = place_documents(where, bounds);
    if (documents.defined()) args.mask.document_bounds = documents.const_data_ptr<std::int32_t>();
  }

  Device device;
  c10::OptionalDeviceGuard guard;
  at::Tensor documents;
};

struct State {
  const at::Tensor &o, &m, &l;
};

void check_state(const State& state, at::IntArrayRef shape, at::ScalarType type, const at::Tensor& like,
                 const char* prefix = "") {
  check_contiguous(state.o, c10::str(prefix, "o").c_str(), shape, type, like);
  check_contiguous(state.m, c10::str(prefix, "m").c_str(), shape.slice(0, 3), type, like);
  check_contiguous(state.l, c10::str(prefix, "l").c_str(), shape.slice(0, 3), type, like);
}

void set_state(BlockArgs& args, const State& state) {
  args.o = state.o.data_ptr();
  args.m = state.m.data_ptr();
  args.l = state.l.data_ptr();
}

std::tuple<at::Tensor, at::Tensor> block_forward(const at::Tensor& o, const at::Tensor& m, const at::Tensor& l,
                                                 const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, at::IntArrayRef query_segments,
                                                 at::IntArrayRef key_segments, std::int64_t key_seq_len, bool is_causal,
                                                 at::OptionalIntArrayRef window,
                                                 const std::optional<at::Tensor>& cu_seqlens,
                                                 std::optional<double> scale, bool finalize) {
  std::vector<std::int32_t> bounds;
  BlockArgs args = check_block(
      query, key, value, {query_segments, key_segments, key_seq_len, is_causal, window, cu_seqlens, scale}, bounds);
  const at::ScalarType accumulation = accumulation_type(query.scalar_type());
  check_state({o, m, l}, query.sizes(), accumulation, query);
  Place place(query.device(), "query", args.dtype, args.D);
  place.put_documents(args, query.device(), bounds);
  const at::Tensor q = with_unit_stride(query), k = with_unit_stride(key), v = with_unit_stride(value);
  args.query = rows(q);
  args.key = rows(k);
  args.value = rows(v);
  set_state(args, {o, m, l});
  args.load_state = args.store_state = true;
  at::Tensor out = at::empty({0}, query.options()), lse = at::empty({0}, o.options());
  if (finalize) {
    args.finalize = true;
    out = empty_rows_like(query, query.scalar_type());
    lse = at::empty_like(m);
    args.out = rows(out);
    args.lse = lse.data_ptr();
  }
  place.device.kernels->forward(args, place.device.launch);
  return {out, lse};
}

void block_backward(const std::optional<at::Tensor>& grad_query, const std::optional<at::Tensor>& grad_key,
                    const std::optional<at::Tensor>& grad_value, const at::Tensor& grad_out, const at::Tensor& query,
                    const at::Tensor& key, const at::Tensor& value, const at::Tensor& lse, const at::Tensor& delta,
                    at::IntArrayRef query_segments, at::IntArrayRef key_segments, std::int64_t key_seq_len,
                    bool is_causal, at::OptionalIntArrayRef window, const std::optional<at::Tensor>& cu_seqlens,
                    std::optional<double> scale, bool deterministic) {
  std::vector<std::int32_t> bounds;
  BlockArgs args = check_block(
      query, key, value, {query_segments, key_segments, key_seq_len, is_causal, window, cu_seqlens, scale}, bounds);
  const at::ScalarType accumulation = accumulation_type(query.scalar_type());
  check_device(grad_out, "grad_out", "query", query);
  check_shape(grad_out, "grad_out", query.sizes());
  check_type(grad_out, "grad_out", query.scalar_type());
  check_contiguous(lse, "lse", query.sizes().slice(0, 3), accumulation, query);
  check_contiguous(delta, "delta", query.sizes().slice(0, 3), accumulation, query);
  const auto accumulator = [&](const std::optional<at::Tensor>& gradient, const char* name, const at::Tensor& like) {
    if (!gradient) return Rows{};
    check_device(*gradient, name, "query", like);
    check_shape(*gradient, name, like.sizes());
    check_type(*gradient, name, accumulation);
    TORCH_CHECK_VALUE(gradient->stride(3) == 1 || gradient->size(3) == 1, name,
                      ": expected stride 1 in the last dimension, got ", gradient->stride(3));
    return rows(*gradient);
  };
  Place place(query.device(), "query", args.dtype, args.D);
  place.put_documents(args, query.device(), bounds);
  args.grad_query = accumulator(grad_query, "grad_query", query);
  args.grad_key = accumulator(grad_key, "grad_key", key);
  args.grad_value = accumulator(grad_value, "grad_value", value);
  const at::Tensor q = with_unit_stride(query), k = with_unit_stride(key), v = with_unit_stride(value);
  const at::Tensor dout = with_unit_stride(grad_out);
  args.query = rows(q);
  args.key = rows(k);
  args.value = rows(v);
  args.grad_out = rows(dout);
  args.lse = lse.data_ptr();
  args.delta = delta.data_ptr();
  at::Tensor minus_delta, minus_lse_log2;
  if (place.device.kernels->has_streams()) {
    constexpr double kLog2E = 1.44269504088896340736, kNothing = -std::numeric_limits<double>::infinity();
    minus_delta = delta.neg();
    minus_lse_log2 = lse.mul(-kLog2E).masked_fill_(lse.eq(kNothing), kNothing);
    args.minus_delta = minus_delta.data_ptr();
    args.minus_lse_log2 = minus_lse_log2.data_ptr();
  }
  args.deterministic = deterministic;
  place.device.kernels->backward(args, place.device.launch);
}

// The sizes of the rows of [B, H, S, D], for kernels that see no keys.
BlockArgs row_args(const at::Tensor& tensor, at::ScalarType input_type) {
  BlockArgs args;
  args.dtype = check_dtype(input_type, "dtype");
  args.B = tensor.size(0);
  args.Hq = args.Hkv = tensor.size(1);
  args.Sq = tensor.size(2);
  args.D = tensor.size(3);
  return args;
}

void check_rows(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.dim() == 4, name, ": expected 4 dimensions [B, H, S, D], got ", tensor.dim());
  TORCH_CHECK_VALUE(tensor.size(3) >= 1 && tensor.size(3) <= 256, name, ": expected a head_dim from 1 to 256, got ",
                    tensor.size(3));
}

at::Tensor delta_op(const at::Tensor& out, const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse) {
  check_dtype(out.scalar_type(), "out");
  check_rows(out, "out");
  check_device(grad_out, "grad_out", "out", out);
  check_shape(grad_out, "grad_out", out.sizes());
  check_type(grad_out, "grad_out", out.scalar_type());
  const at::ScalarType accumulation = accumulation_type(out.scalar_type());
  BlockArgs args = row_args(out, out.scalar_type());
  const Place place(out.device(), "out", args.dtype, args.D);
  const at::Tensor o = with_unit_stride(out), dout = with_unit_stride(grad_out);
  args.out = rows(o);
  args.grad_out = rows(dout);
  at::Tensor dlse;
  if (grad_lse) {
    check_device(*grad_lse, "grad_lse", "out", out);
    check_shape(*grad_lse, "grad_lse", out.sizes().slice(0, 3));
    check_type(*grad_lse, "grad_lse", accumulation);
    dlse = grad_lse->contiguous();
    args.grad_lse = dlse.data_ptr();
  }
  at::Tensor delta = at::empty(out.sizes().slice(0, 3), out.options().dtype(accumulation));
  args.delta = delta.data_ptr();
  place.device.kernels->delta(args, place.device.launch);
  return delta;
}

void check_state_type(const at::Tensor& o) {
  TORCH_CHECK_TYPE(o.scalar_type() == at::kFloat || o.scalar_type() == at::kDouble,
                   "o: expected dtype float32 or float64, got ", type_name(o.scalar_type()));
}

void merge(const at::Tensor& o, const at::Tensor& m, const at::Tensor& l, const at::Tensor& other_o,
           const at::Tensor& other_m, const at::Tensor& other_l, double scale) {
  check_state_type(o);
  check_rows(o, "o");
  check_state({o, m, l}, o.sizes(), o.scalar_type(), o);
  check_state({other_o, other_m, other_l}, o.sizes(), o.scalar_type(), o, "other_");
  // A state is float on every device that has no float64; what its kernels would round to does not matter here.
  BlockArgs args = row_args(o, o.is_cpu() ? o.scalar_type() : at::kBFloat16);
  TORCH_CHECK_TYPE(o.is_cpu() || o.scalar_type() == at::kFloat, "o: expected dtype float32 on ", o.device(), ", got ",
                   type_name(o.scalar_type()));
  const Place place(o.device(), "o", args.dtype, args.D);
  args.scale = check_scale(scale, args.D, o.scalar_type());
  set_state(args, {o, m, l});
  args.other_o = other_o.const_data_ptr();
  args.other_m = other_m.const_data_ptr();
  args.other_l = other_l.const_data_ptr();
  place.device.kernels->merge(args, place.device.launch);
}

std::tuple<at::Tensor, at::Tensor> finalize_op(const at::Tensor& o, const at::Tensor& m, const at::Tensor& l,
                                               double scale, at::ScalarType dtype) {
  check_state_type(o);
  check_rows(o, "o");
  check_state({o, m, l}, o.sizes(), o.scalar_type(), o);
  TORCH_CHECK_TYPE(accumulation_type(dtype) == o.scalar_type(), "dtype: expected a type whose state is ",
                   type_name(o.scalar_type()), ", got ", type_name(dtype));
  BlockArgs args = row_args(o, dtype);
  const Place place(o.device(), "dtype", args.dtype, args.D);
  args.scale = check_scale(scale, args.D, o.scalar_type());
  set_state(args, {o, m, l});
  at::Tensor out = at::empty(o.sizes(), o.options().dtype(dtype)), lse = at::empty_like(m);
  args.out = rows(out);
  args.lse = lse.data_ptr();
  place.device.kernels->finalize(args, place.device.launch);
  return {out, lse};
}

std::int64_t key_tile(at::ScalarType dtype, std::int64_t head_dim, at::Device where) {
  TORCH_CHECK_VALUE(head_dim >= 1 && head_dim <= 256, "head_dim: expected a number from 1 to 256, got ", head_dim);
  const DType type = check_dtype(dtype, "dtype");
  if (!where.is_cpu() && !where.has_index()) {
    kernels_for({where.type(), 0}, "device", type, head_dim);  // without a GPU there is no current one
    where = c10::impl::VirtualGuardImpl(where.type()).getDevice();
  }
  const Place place(where, "device", type, head_dim);
  return place.device.kernels->key_tile(type, head_dim);
}

}  // namespace
}  // namespace ringattn

TORCH_LIBRARY_FRAGMENT(ringattn, m) {
  using ringattn::implement;
  implement<ringattn::block_forward>(m, "block_forward_");
  implement<ringattn::block_backward>(m, "block_backward_");
  implement<ringattn::delta_op>(m, "delta");
  implement<ringattn::merge>(m, "merge_");
  implement<ringattn::finalize_op>(m, "finalize");
}

TORCH_LIBRARY_IMPL(ringattn, CompositeExplicitAutograd, m) { m.impl("key_tile", ringattn::key_tile); }
