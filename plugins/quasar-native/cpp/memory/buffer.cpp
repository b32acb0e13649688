#include "buffer.hpp"

#include <mutex>

namespace quasar {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kSlabBytes = 0;  // each weight by itself, so that a step beyond its end is found
#else
constexpr size_t kSlabBytes = size_t{16} << 20;
#endif
constexpr size_t kAlignment = 64;

struct Slab {
  std::weak_ptr<void> memory;  // weak, so that a slab whose weights are gone does not stay
  size_t used = 0;
};

}  // namespace

std::shared_ptr<void> allocate_beside_others(size_t bytes) {
  static std::mutex mutex;
  static Slab slab;
  if (bytes > kSlabBytes / 4) return allocate(bytes);
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard lock(mutex);
  std::shared_ptr<void> memory = slab.memory.lock();
  if (memory == nullptr || slab.used + rounded > kSlabBytes) {
    memory = allocate(kSlabBytes);
    slab = {memory, 0};
  }
  void* const begin = static_cast<char*>(memory.get()) + slab.used;
  slab.used += rounded;
  return std::shared_ptr<void>(std::move(memory), begin);
}

}  // namespace quasar
