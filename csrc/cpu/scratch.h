// Memory that a task or a pass works in: growing buffers per thread, cut into aligned arrays, and kept, since the
// system would clear fresh memory page by page in every call.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#if !defined(__SANITIZE_ADDRESS__) && defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1  // as gcc and newer clang do
#endif
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace ringattn::cpu {

// Arrays are taken in order, after reserve() said how much they need together; they live until the next reserve()
// and start with whatever was there before.
class Scratch {
 public:
  static Scratch& of_this_thread() {
    thread_local Scratch scratch;
    return scratch;
  }

  // For what the tasks of a pass share, on the thread that runs the pass.
  static Scratch& of_this_pass() {
    thread_local Scratch scratch;
    return scratch;
  }

  // Room for `arrays` arrays of together `bytes` bytes.
  void reserve(std::int64_t bytes, int arrays) {
    const std::size_t needed = static_cast<std::size_t>(bytes) + static_cast<std::size_t>(arrays) * (kAlignment + kGap);
    if (needed > size_) {
      buffer_.reset();
      size_ = 0;
      buffer_.reset(static_cast<std::byte*>(::operator new(needed, std::align_val_t{kAlignment})));
      size_ = needed;
    }
    used_ = 0;
    forbid(buffer_.get(), size_);
  }

  // Gives a buffer back that is larger: those of unusually large calls. Its arrays end.
  void keep_at_most(std::int64_t bytes) {
    if (size_ <= static_cast<std::size_t>(bytes)) return;
    buffer_.reset();
    size_ = used_ = 0;
  }

  template <typename A>
  A* take(std::int64_t count) {
    A* array = reinterpret_cast<A*>(buffer_.get() + used_);
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(A);
    used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment + kGap;
    assert(used_ <= size_);
    allow(array, bytes);
    return array;
  }

 private:
  static constexpr std::size_t kAlignment = 64;

  // AddressSanitizer sees what leaves an array: all that lies outside of those that were taken, which have gaps between
  // them then, is forbidden.
#if defined(__SANITIZE_ADDRESS__)
  static constexpr std::size_t kGap = kAlignment;
  static void forbid(const void* data, std::size_t size) { __asan_poison_memory_region(data, size); }
  static void allow(const void* data, std::size_t size) { __asan_unpoison_memory_region(data, size); }
#else
  static constexpr std::size_t kGap = 0;
  static void forbid(const void*, std::size_t) {}
  static void allow(const void*, std::size_t) {}
#endif

  struct Release {
    void operator()(std::byte* pointer) const { ::operator delete(pointer, std::align_val_t{kAlignment}); }
  };

  std::unique_ptr<std::byte, Release> buffer_;
  std::size_t size_ = 0, used_ = 0;
};

}  // namespace ringattn::cpu
