// P virtual ranks in this process: a thread for each, the same passes, the loopback transport. Whole tensors in and
// out.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <optional>
#include <thread>

#include "comm/loopback_transport.h"
#include "core/error.h"
#include "ops/device.h"
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

// The speed to which copies between virtual ranks on a GPU are slowed down, if RINGATTN_LOOPBACK_GBPS gives one.
Pacing pacing_on(at::Device where) {
  const char* text = std::getenv("RINGATTN_LOOPBACK_GBPS");
  if (text == nullptr || *text == '\0') return {};
  char* end = nullptr;
  const double speed = std::strtod(text, &end);
  TORCH_CHECK_VALUE(*end == '\0' && speed > 0 && std::isfinite(speed),
                    "RINGATTN_LOOPBACK_GBPS: expected a number of gigabytes per second above 0, got ", text);
  const KernelTable* table = find_kernels(static_cast<int>(where.type()));
  TORCH_CHECK_NOT_IMPLEMENTED(table != nullptr && table->pace != nullptr, "RINGATTN_LOOPBACK_GBPS: copies on ", where,
                              " cannot be slowed down");
  return {table->pace, speed};
}

// On a device with streams: a stream for each virtual rank, that begins where the caller's stream is and whose end the
// caller's stream waits for, also if the rank fails.
class RankStreams {
 public:
  RankStreams(at::Device where, int world_size) : streams_(where.type()), ends_(world_size) {
    if (where.is_cpu() || world_size == 1) return;
    caller_ = streams_.getStream(where);
    begin_.emplace(where.type()).record(*caller_);
    for (int rank = 0; rank < world_size; ++rank) ranks_.push_back(virtual_stream(where, 2 * rank));
  }

  template <typename Function>
  void run_on(int rank, const Function& function) {
    if (!caller_) return function();
    const c10::StreamGuard guard(ranks_[rank]);
    begin_->block(ranks_[rank]);
    const auto end = [&] { ends_[rank].emplace(caller_->device_type()).record(ranks_[rank]); };
    try {
      function();
    } catch (...) {
      end();
      throw;
    }
    end();
  }

  void join() {
    for (const auto& end : ends_) {
      if (end) end->block(*caller_);
    }
  }

 private:
  c10::impl::VirtualGuardImpl streams_;
  std::optional<c10::Stream> caller_;
  std::optional<c10::Event> begin_;
  std::vector<c10::Stream> ranks_;
  std::vector<std::optional<c10::Event>> ends_;
};

// Runs body(ring, threads) as every virtual rank. The first failure in rank order that is not a mere echo of another
// rank's failure goes on.
template <typename Body>
void run_virtual_ranks(int world_size, at::Device where, Body body) {
  TORCH_CHECK(world_size == 1 || capture_on(where) == 0,
              "virtual ranks are threads of their own, which cannot be captured into one graph");
  LoopbackHub hub(world_size, world_size == 1 || where.is_cpu() ? Pacing{} : pacing_on(where));
  RankStreams streams(where, world_size);
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
      streams.run_on(rank, [&] { body(ring, threads); });
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
  streams.join();

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
  kernels_for(query.device(), "query", pass.dtype, pass.D);  // refused here rather than by every rank
  const c10::OptionalDeviceGuard guard(query.device());

  at::Tensor out = empty_rows_like(query, pass.input_type);
  at::Tensor lse = at::empty(query.sizes().slice(0, 3), query.options().dtype(pass.accumulation_type));
  at::Tensor kept = at::empty({P, kept_size(pass)}, key.options());
  run_virtual_ranks(P, query.device(), [&](Ring& ring, int threads) {
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
  kernels_for(query.device(), "query", pass.dtype, pass.D);
  const c10::OptionalDeviceGuard guard(query.device());
  check_shape(grad_out, "grad_out", query.sizes());
  check_shape(out, "out", query.sizes());
  check_shape(lse, "lse", query.sizes().slice(0, 3));
  check_shape(kept, "kept", {P, kept_size(pass)});
  if (grad_lse) check_shape(*grad_lse, "grad_lse", query.sizes().slice(0, 3));

  const auto result = [&](bool wanted, const at::Tensor& like) {
    return wanted ? empty_rows_like(like, pass.input_type) : at::empty({0}, query.options());
  };
  at::Tensor grad_query = result(pass.needs_grad_query, query);
  at::Tensor grad_key = result(pass.needs_grad_key, key);
  at::Tensor grad_value = result(pass.needs_grad_value, value);
  run_virtual_ranks(P, query.device(), [&](Ring& ring, int threads) {
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

TORCH_LIBRARY_FRAGMENT(ringattn, m) {
  ringattn::implement<ringattn::forward_op>(m, "virtual_ring_forward");
  ringattn::implement<ringattn::backward_op>(m, "virtual_ring_backward");
}
