#include "ops/device.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <mutex>

#include "cpu/kernels.h"
#include "ops/checks.h"

namespace ringattn {
namespace {

// Tasks are handed out one by one, because masks make them unequal. Kernels do not depend on who runs what.
ParallelFor parallel_over(int threads) {
  return [threads](std::int64_t count, const std::function<void(std::int64_t)>& task) {
    std::atomic<std::int64_t> next{0};
    const auto worker = [&](std::int64_t, std::int64_t) {
      for (std::int64_t i = next++; i < count; i = next++) task(i);
    };
    const std::int64_t workers = std::min<std::int64_t>(threads, count);
    if (workers <= 1) {
      worker(0, 1);
    } else {
      at::parallel_for(0, workers, 1, worker);
    }
  };
}

const KernelTable* table_of(at::Device where) { return find_kernels(static_cast<int>(where.type())); }

c10::Stream current_stream(at::Device where) { return c10::impl::VirtualGuardImpl(where.type()).getStream(where); }

void raise(const Obstacle& obstacle, const char* name, DType dtype, std::int64_t head_dim) {
  switch (obstacle.kind) {
    case Obstacle::Kind::none:
      return;
    case Obstacle::Kind::device:
      C10_THROW_ERROR(NotImplementedError, c10::str(name, ": ", obstacle.text));
    case Obstacle::Kind::dtype:
      C10_THROW_ERROR(TypeError, c10::str(name, ": ", obstacle.text, ", got ", type_name(scalar_type(dtype))));
    case Obstacle::Kind::head_dim:
      C10_THROW_ERROR(ValueError, c10::str(name, ": ", obstacle.text, ", got ", head_dim));
  }
}

}  // namespace

Device kernels_for(at::Device where, const char* name, DType dtype, std::int64_t head_dim, int threads) {
  Device device;
  if (where.is_cpu()) {
    device.kernels = &cpu::kernels();
    device.launch.parallel = parallel_over(threads);
    return device;
  }
  device.kernels = table_of(where);
  if (device.kernels == nullptr) {
    const char* hint = where.is_cuda() ? ": it is CPU only; build it where nvcc and a torch with CUDA are" : "";
    C10_THROW_ERROR(NotImplementedError,
                    c10::str(name, ": this build of ringattn_ext has no kernels for ", where, hint));
  }
  if (device.kernels->obstacle != nullptr) {
    raise(device.kernels->obstacle(dtype, head_dim, where.index()), name, dtype, head_dim);
  }
  if (device.kernels->has_streams()) device.launch.stream = current_stream(where).native_handle();
  return device;
}

std::uint64_t capture_on(at::Device where) {
  if (where.is_cpu()) return 0;
  const KernelTable* table = table_of(where);
  if (table == nullptr || !table->has_streams()) return 0;
  // Without a usable device there is no stream to ask for.
  constexpr DType any = DType::bfloat16;
  if (table->obstacle != nullptr && table->obstacle(any, 64, where.index()).kind == Obstacle::Kind::device) return 0;
  return table->capture(current_stream(where).native_handle());
}

std::uint64_t current_capture() {
  for (const at::DeviceType type : {at::kCUDA, at::kPrivateUse1}) {
    const KernelTable* table = find_kernels(static_cast<int>(type));
    if (table == nullptr ||
        (table->obstacle != nullptr && table->obstacle(DType::bfloat16, 64, 0).kind == Obstacle::Kind::device)) {
      continue;
    }
    const std::uint64_t capture = capture_on(c10::impl::VirtualGuardImpl(type).getDevice());
    if (capture != 0) return capture;
  }
  return 0;
}

at::Tensor place_documents(at::Device where, const std::vector<std::int32_t>& bounds) {
  const KernelTable* table = where.is_cpu() ? nullptr : table_of(where);
  if (table == nullptr || !table->has_streams() || bounds.empty()) return {};

  // By stream, since the copy is ordered on one alone. What a graph has captured is kept for good: it is read there
  // whenever the graph is replayed.
  struct Entry {
    c10::Stream stream;
    std::vector<std::int32_t> bounds;
    at::Tensor copy;
    bool captured = false;
  };
  constexpr std::ptrdiff_t kKept = 16;  // of those that no graph has captured
  static std::mutex mutex;
  static auto& entries = *new std::list<Entry>;  // the last used first; never destroyed: at exit the device may be gone
  const c10::Stream stream = current_stream(where);
  const bool capturing = table->capture(stream.native_handle()) != 0;
  const std::lock_guard lock(mutex);
  const auto found = std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) {
    // A capture runs on a stream of its own; what was copied on another one is there once its host waited for it.
    return (entry.stream == stream || (capturing && entry.stream.device() == where)) && entry.bounds == bounds;
  });
  if (found != entries.end()) {
    entries.splice(entries.begin(), entries, found);
    found->captured = found->captured || capturing;
    return found->copy;
  }
  TORCH_CHECK(!capturing,
              "cu_seqlens: a graph is being captured, and these documents are new; make one call with them before");
  const auto kept = [](const Entry& entry) { return !entry.captured; };
  if (std::count_if(entries.begin(), entries.end(), kept) >= kKept) {
    entries.erase(std::next(std::find_if(entries.rbegin(), entries.rend(), kept)).base());
  }
  const auto options = at::TensorOptions().dtype(at::kInt);
  at::Tensor host = at::empty({static_cast<std::int64_t>(bounds.size())}, options.pinned_memory(where.is_cuda()));
  std::copy(bounds.begin(), bounds.end(), host.mutable_data_ptr<std::int32_t>());
  entries.push_front({stream, bounds, host.to(options.device(where), /*non_blocking=*/true), false});
  return entries.front().copy;
}

}  // namespace ringattn
