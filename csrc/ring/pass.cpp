#include "ring/pass.h"

#include <ATen/Functions.h>

namespace ringattn {

void Pass::describe(CallHeader& header) const {
  const auto flag = [](bool value) { return std::int64_t{value}; };
  header.set(Field::dtype, std::int64_t{static_cast<int>(input_type)});
  header.set(Field::layout, std::int64_t{static_cast<int>(query_layout.kind())});
  header.set(Field::seq_len, std::int64_t{query_layout.seq_len()});
  header.set(Field::key_seq_len, std::int64_t{key_layout.seq_len()});
  header.set(Field::batch, B);
  header.set(Field::query_heads, Hq);
  header.set(Field::key_heads, Hkv);
  header.set(Field::head_dim, D);
  header.set(Field::causal, flag(is_causal));
  header.set(Field::window_left, std::int64_t{mask.left});
  header.set(Field::window_right, std::int64_t{mask.right});
  if (mask.document_bounds != nullptr) {
    header.set(Field::document_count, std::int64_t{mask.document_count});
    header.set(Field::document_hash, document_hash(document_bounds));
  }
  header.set(Field::scale, scale);
  header.set(Field::deterministic, flag(deterministic));
  header.set(Field::needs_grad, flag(needs_grad_query) | flag(needs_grad_key) << 1 | flag(needs_grad_value) << 2);
}

BlockArgs Pass::block_args(int rank) const {
  BlockArgs args;
  args.dtype = dtype;
  args.B = B;
  args.Hq = Hq;
  args.Hkv = Hkv;
  args.D = D;
  args.Sq = query_layout.length(rank);
  args.query_segments = query_layout.segments(rank);
  args.mask = mask;
  if (device_documents.defined()) args.mask.document_bounds = device_documents.const_data_ptr<std::int32_t>();
  args.scale = scale;
  args.deterministic = deterministic;
  return args;
}

namespace {

// What the kernel of a step has to do.
std::string work_of(const Pass& pass, Visibility visibility) {
  if (visibility == Visibility::skip) return "skipped";
  if (visibility == Visibility::full) return "full";
  std::string text;
  const auto add = [&](const char* name) { text += (text.empty() ? "" : ", ") + std::string(name); };
  const bool causal = pass.mask.right == 0;
  if (causal) add("causal");
  if (pass.mask.left != Mask::kUnbounded || (!causal && pass.mask.right != Mask::kUnbounded)) add("window");
  if (pass.mask.document_bounds != nullptr) add("documents");
  return text;
}

}  // namespace

StepScope::StepScope(const Pass& pass, const char* direction, std::size_t step, int block, Visibility visibility)
    : record_(at::RecordScope::USER_SCOPE) {
  if (!record_.isActive()) return;
  name_ = std::string(direction) + " step " + std::to_string(step) + ": block " + std::to_string(block) + ", " +
          work_of(pass, visibility);
  record_.before(name_);
}

Rows rows(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

at::Tensor empty_rows_like(const at::Tensor& tensor, at::ScalarType type) {
  const auto options = tensor.options().dtype(type);
  const std::int64_t B = tensor.size(0), H = tensor.size(1), S = tensor.size(2), D = tensor.size(3);
  const bool heads_inside = tensor.stride(3) == 1 && tensor.stride(1) < tensor.stride(2);
  return heads_inside ? at::empty({B, S, H, D}, options).transpose(1, 2) : at::empty({B, H, S, D}, options);
}

std::int64_t packed_size(const Pass& pass, int parts) {
  return parts * pass.B * pass.Hkv * pass.key_layout.capacity() * pass.D;
}

std::int64_t kept_size(const Pass& pass) {
  return pass.world_size() > 1 && pass.needs_grad() ? packed_size(pass, 2) : 0;
}

PackedBlock::PackedBlock(const at::Tensor& buffer, const Pass& pass, int block, int count) {
  const std::int64_t tokens = pass.key_layout.length(block);
  const std::int64_t elements = pass.B * pass.Hkv * tokens * pass.D;
  message = buffer.narrow(0, 0, count * elements);
  for (int part = 0; part < count; ++part) {
    parts.push_back(buffer.narrow(0, part * elements, elements).view({pass.B, pass.Hkv, tokens, pass.D}));
  }
}

void set_block(BlockArgs& args, const Pass& pass, int block, const at::Tensor& key, const at::Tensor& value) {
  args.key_segments = pass.key_layout.segments(block);
  args.Skv = args.key_segments.length();
  args.key = rows(key);
  args.value = rows(value);
}

}  // namespace ringattn
