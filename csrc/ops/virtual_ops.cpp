// P virtual ranks in this process: a thread for each, the same passes, the loopback transport. Whole tensors in and
// out.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <torch/library.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <exception>
#include <thread>

#include "comm/loopback_transport.h"
#include "core/error.h"
#include "ops/ring_ops.h"
#include "ring/gather.h"

namespace ringattn {
namespace {

constexpr std::int64_t kTokenDim = 2;

// Gives this thread, which is a virtual rank, its share of the process's threads also in torch's own operators.
void limit_threads([[maybe_unused]] int threads) {
#ifdef _OPENMP
  at::get_num_threads();  // torch sets the thread's number when it is first asked; after that it is ours
  omp_set_num_threads(threads);
#endif
}

// Runs body(ring, threads) as every virtual rank. The first failure in rank order that is not a mere echo of another
// rank's failure goes on.
template <typename Body>
void run_virtual_ranks(int world_size, Body body) {
  LoopbackHub hub(world_size);
  const int threads = std::max(1, at::get_num_threads() / world_size);
  const at::ThreadLocalState caller;
  std::vector<std::exception_ptr> failures(world_size);
  const auto run = [&](int rank) {
    try {
      const at::ThreadLocalStateGuard guard(caller);
      Ring ring;
      ring.rank = rank;
      ring.world_size = world_size;
      if (world_size > 1) {
        ring.transport = hub.transport(rank);
        limit_threads(threads);
      }
      body(ring, threads);
    } catch (...) {
      failures[rank] = std::current_exception();
      hub.abort("virtual rank " + std::to_string(rank) + " failed");
    }
  };
  std::string no_thread;
  if (world_size == 1) {
    run(0);
  } else {
    std::vector<std::jthread> ranks;
    try {
      for (int rank = 0; rank < world_size; ++rank) ranks.emplace_back(run, rank);
    } catch (const std::exception& error) {
      no_thread = "no thread for virtual rank " + std::to_string(ranks.size()) + ": " + error.what();
      hub.abort(no_thread);
    }
  }

  if (!no_thread.empty()) throw RingError(no_thread);

  std::exception_ptr echo;
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const RingError&) {
      if (!echo) echo = failure;
    }
  }
  if (echo) std::rethrow_exception(echo);
}

int check_world_size(std::int64_t world_size) {
  TORCH_CHECK_VALUE(world_size >= 1 && world_size <= 1024, "world_size: expected a number from 1 to 1024, got ",
                    world_size);
  return static_cast<int>(world_size);
}

// Checks the whole tensors, then fixes the lengths that a single rank could not know.
Pass check_whole(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, PassOptions& options, int P) {
  Pass pass = check_pass(query, key, value, options, {P, std::nullopt});
  options.seq_len = pass.query_layout.seq_len();
  options.key_seq_len = pass.key_layout.seq_len();
  return pass;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_op(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, std::int64_t world_size,
    std::string layout, bool is_causal, at::OptionalIntArrayRef window, const std::optional<at::Tensor>& cu_seqlens,
    std::optional<double> scale, bool enable_gqa, bool deterministic, c10::List<bool> needs_grad) {
  const int P = check_world_size(world_size);
  PassOptions options = pass_options(std::move(layout), std::nullopt, std::nullopt, is_causal, window, cu_seqlens,
                                     scale, enable_gqa, deterministic, needs_grad);
  const Pass pass = check_whole(query, key, value, options, P);

  at::Tensor out = empty_rows_like(query, pass.input_type);
  at::Tensor lse = at::empty(query.sizes().slice(0, 3), query.options().dtype(pass.accumulation_type));
  at::Tensor kept = at::empty({P, P == 1 ? 0 : packed_size(pass, 2)}, key.options());
  run_virtual_ranks(P, [&](Ring& ring, int threads) {
    const Segments own = pass.query_layout.segments(ring.rank), own_keys = pass.key_layout.segments(ring.rank);
    const auto [rank_out, rank_lse, rank_kept] =
        forward_on(ring, take_segments(query, kTokenDim, own), take_segments(key, kTokenDim, own_keys),
                   take_segments(value, kTokenDim, own_keys), {}, options, threads);
    put_segments(out, kTokenDim, own, rank_out);
    put_segments(lse, kTokenDim, own, rank_lse);
    kept[ring.rank].copy_(rank_kept);
  });
  return {out, lse, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_op(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& kept, std::int64_t world_size, std::string layout, bool is_causal, at::OptionalIntArrayRef window,
    const std::optional<at::Tensor>& cu_seqlens, std::optional<double> scale, bool enable_gqa, bool deterministic,
    c10::List<bool> needs_grad) {
  const int P = check_world_size(world_size);
  PassOptions options = pass_options(std::move(layout), std::nullopt, std::nullopt, is_causal, window, cu_seqlens,
                                     scale, enable_gqa, deterministic, needs_grad);
  const Pass pass = check_whole(query, key, value, options, P);
  check_shape(grad_out, "grad_out", query.sizes());
  check_shape(out, "out", query.sizes());
  check_shape(lse, "lse", query.sizes().slice(0, 3));
  check_shape(kept, "kept", {P, P == 1 ? 0 : packed_size(pass, 2)});
  if (grad_lse) check_shape(*grad_lse, "grad_lse", query.sizes().slice(0, 3));

  const auto result = [&](bool wanted, const at::Tensor& like) {
    return wanted ? empty_rows_like(like, pass.input_type) : at::empty({0}, query.options());
  };
  at::Tensor grad_query = result(pass.needs_grad_query, query);
  at::Tensor grad_key = result(pass.needs_grad_key, key);
  at::Tensor grad_value = result(pass.needs_grad_value, value);
  run_virtual_ranks(P, [&](Ring& ring, int threads) {
    const Segments own = pass.query_layout.segments(ring.rank), own_keys = pass.key_layout.segments(ring.rank);
    const auto take = [](const at::Tensor& whole, const Segments& segments) {
      return take_segments(whole, kTokenDim, segments);
    };
    SavedForBackward saved{take(query, own),    take(key, own_keys), take(value, own_keys),
                           take(out, own),      take(lse, own),      kept[ring.rank],
                           take(grad_out, own), std::nullopt,        {}};
    if (grad_lse) saved.grad_lse = take(*grad_lse, own);
    const auto [dq, dk, dv] = backward_on(ring, saved, options, threads);
    if (pass.needs_grad_query) put_segments(grad_query, kTokenDim, own, dq);
    if (pass.needs_grad_key) put_segments(grad_key, kTokenDim, own_keys, dk);
    if (pass.needs_grad_value) put_segments(grad_value, kTokenDim, own_keys, dv);
  });
  return {grad_query, grad_key, grad_value};
}

}  // namespace
}  // namespace ringattn

TORCH_LIBRARY_IMPL(ringattn, CPU, m) {
  m.impl("virtual_ring_forward", ringattn::forward_op);
  m.impl("virtual_ring_backward", ringattn::backward_op);
}
