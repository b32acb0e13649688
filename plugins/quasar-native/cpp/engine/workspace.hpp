// Scratch memory of a forward: it grows to what the largest one needed and is then used again.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace quasar {

class Buffer {
 public:
  // At least n floats, aligned to 64 bytes; what they hold is not kept when the buffer grows. Throws std::bad_alloc.
  float* floats(int64_t n) {
    if (n > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<float*>(::operator new(sizeof(float) * n, kAlignment)));
      size_ = n;
    }
    return data_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<float, Free> data_;
  int64_t size_ = 0;
};

struct Workspace {
  Buffer residual, normed, qkv, mixed, projected, gate_up, gated, cosines, sines, scores;
};

}  // namespace quasar
