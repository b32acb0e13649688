// How keys and values become what a cache of each format stores.
#pragma once

#include <cmath>
#include <cstring>

#include "kernels.hpp"
#include "products/lanes/lanes.hpp"

namespace quasar {
namespace {

struct Float32Storage {
  using Type = float;
  static constexpr CacheFormat kFormat = CacheFormat::float32;
  static QUASAR_INLINE float of(float value, float) { return value; }
};

struct Bfloat16Storage {
  using Type = uint16_t;
  static constexpr CacheFormat kFormat = CacheFormat::bfloat16;
  static QUASAR_INLINE uint16_t of(float value, float) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
};

struct Int8Storage {
  using Type = int8_t;
  static constexpr CacheFormat kFormat = CacheFormat::int8;
  static QUASAR_INLINE int8_t of(float value, float scale) {
    const float scaled = value / scale;
    return scaled == scaled ? static_cast<int8_t>(__builtin_rintf(scaled)) : int8_t{0};
  }
};

// Symmetric: the largest value becomes 127. NaN where a value is not finite, so that it is not lost.
QUASAR_INLINE float scale_of(const float* values, int64_t n) {
  float most = 0.0f;
  float zeros = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    const float size = __builtin_fabsf(values[i]);
    most = size > most ? size : most;
    zeros += values[i] - values[i];
  }
  return (most > 1e-30f ? most : 1e-30f) / 127.0f + zeros;
}

template <class Storage>
void remember(const HeadLayout& layout, std::byte* head, int64_t slot, const float* key, const float* value) {
  using Type = typename Storage::Type;
  float key_scale = 1.0f, value_scale = 1.0f;
  if constexpr (info_of(Storage::kFormat).scaled) {
    key_scale = reinterpret_cast<float*>(head + layout.key_scales)[slot] = scale_of(key, layout.head_dim);
    value_scale = reinterpret_cast<float*>(head + layout.value_scales)[slot] = scale_of(value, layout.head_dim);
  }
  Type* keys = reinterpret_cast<Type*>(head) + slot;
  Type* values = reinterpret_cast<Type*>(head + layout.values) + slot * layout.padded_dim;
  for (int64_t i = 0; i < layout.head_dim; ++i) keys[i * kBlockPositions] = Storage::of(key[i], key_scale);
  for (int64_t i = 0; i < layout.head_dim; ++i) values[i] = Storage::of(value[i], value_scale);
}

}  // namespace
}  // namespace quasar
