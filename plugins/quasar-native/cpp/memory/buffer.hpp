// Memory for weights and scratch, aligned for vectors.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quasar {

// Uninitialised. Large ones lie on huge pages where the system gives them: reading a weight from end to end then takes
// few look-ups of addresses.
inline std::shared_ptr<void> allocate(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  const size_t alignment = bytes >= kHuge ? kHuge : 64;
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHuge) madvise(memory, rounded, MADV_HUGEPAGE);
#endif
  return std::shared_ptr<void>(memory, std::free);
}

// Memory for a weight, which shares huge pages with the weights made before and after it: a model has many that are
// smaller than such a page. It is freed with the last of those that share it.
std::shared_ptr<void> allocate_beside_others(size_t bytes);

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t size) : Buffer(allocate(size * sizeof(T)), size) {}
  static Buffer beside_others(size_t size) { return Buffer(allocate_beside_others(size * sizeof(T)), size); }

  // What it held is lost where it has to grow.
  T* at_least(size_t size) {
    if (size > size_) {
      *this = Buffer();
      *this = Buffer(size);
    }
    return data();
  }
  T* data() const { return static_cast<T*>(memory_.get()); }
  size_t bytes() const { return size_ * sizeof(T); }
  void fill_with_zeros() { std::memset(memory_.get(), 0, bytes()); }

 private:
  Buffer(std::shared_ptr<void> memory, size_t size) : memory_(std::move(memory)), size_(size) {}

  std::shared_ptr<void> memory_;
  size_t size_ = 0;
};

}  // namespace quasar
