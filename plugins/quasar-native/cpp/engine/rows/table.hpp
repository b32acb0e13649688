// The table of row kernels of one instruction set, written once for all; `L` is a type of lanes (products/lanes).
#pragma once

#include "attention.hpp"
#include "kernels.hpp"
#include "products/lanes/lanes.hpp"
#include "storage.hpp"

namespace quasar {
namespace {

template <class L>
void rms_norm(const float* inputs, const float* weight, float epsilon, int64_t n, float* outputs) {
  using Floats = typename L::Floats;
  Floats squares = L::broadcast(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats x = load_first<L>(inputs + i, n - i);
    squares = L::fma(x, x, squares);
  }
  const Floats scale = L::broadcast(1.0f / __builtin_sqrtf(sum_of<L>(squares) / static_cast<float>(n) + epsilon));
  for (int64_t i = 0; i < n; i += kLanes) {
    const Floats normed = load_first<L>(inputs + i, n - i) * scale * load_first<L>(weight + i, n - i);
    store_first<L>(outputs + i, normed, n - i);
  }
}

template <class L>
void add(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_first<L>(to + i, load_first<L>(to + i, n - i) + load_first<L>(from + i, n - i), n - i);
  }
}

template <class L>
QUASAR_INLINE typename L::Floats activate(Activation activation, typename L::Floats x) {
  // Both are x times a logistic function: 1 + tanh(u) = 2 / (1 + e^(-2u)).
  typename L::Floats u = x;
  if (activation == Activation::gelu_tanh) {
    u = L::fma(x * x * x, L::broadcast(0.044715f), x) * L::broadcast(1.595769122f);  // 2 sqrt(2 / pi)
  }
  return x / (exponential<L>(-u) + L::broadcast(1.0f));
}

template <class L, Activation activation>
void gate_with(const float* gate, const float* up, int64_t n, float* outputs) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const typename L::Floats open = activate<L>(activation, load_first<L>(gate + i, n - i));
    store_first<L>(outputs + i, open * load_first<L>(up + i, n - i), n - i);
  }
}

template <class L>
void gate(Activation activation, const float* gate, const float* up, int64_t n, float* outputs) {
  if (activation == Activation::silu) {
    gate_with<L, Activation::silu>(gate, up, n, outputs);
  } else {
    gate_with<L, Activation::gelu_tanh>(gate, up, n, outputs);
  }
}

template <class L>
void rotate(float* head, const float* cosines, const float* sines, int64_t half) {
  using Floats = typename L::Floats;
  float* other = head + half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Floats a = load_first<L>(head + i, left), b = load_first<L>(other + i, left);
    const Floats c = load_first<L>(cosines + i, left), s = load_first<L>(sines + i, left);
    store_first<L>(head + i, L::sum_of_products(a, c, -b, s), left);
    store_first<L>(other + i, L::sum_of_products(b, c, a, s), left);
  }
}

template <class L>
void soft_cap(float* values, float cap, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store_first<L>(values + i, capped<L>(load_first<L>(values + i, n - i), cap), n - i);
  }
}

template <class L>
bool all_finite(const float* values, int64_t n) {
  typename L::Floats zeros = L::broadcast(0.0f);  // x - x is 0, or NaN where x is not finite
  for (int64_t i = 0; i < n; i += kLanes) {
    const typename L::Floats x = load_first<L>(values + i, n - i);
    zeros = zeros + (x - x);
  }
  return sum_of<L>(zeros) == 0.0f;
}

template <class L, class... Storage>
constexpr std::array<CacheKernels, sizeof...(Storage)> cache_kernels() {
  // The order is that of the formats: a storage in the wrong place does not compile.
  int64_t place = 0;
  const bool in_order = ((static_cast<int64_t>(Storage::kFormat) == place++) && ...);
  if (!in_order) throw "the storages are not in the order of kCacheFormats";
  return {{CacheKernels{remember<Storage>, attend<L, Storage>}...}};
}

template <class L>
constexpr RowKernels make_row_kernels() {
  constexpr auto of_cache = cache_kernels<L, Float32Storage, Bfloat16Storage, Int8Storage>();
  return {rms_norm<L>, add<L>, gate<L>, rotate<L>, soft_cap<L>, all_finite<L>, of_cache};
}

}  // namespace
}  // namespace quasar
