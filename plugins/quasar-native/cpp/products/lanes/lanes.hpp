// Sixteen floats at a time: the one layer between what is computed and the instructions of a CPU.
//
// A type `L` of lanes (PortableLanes, Avx2Lanes, Avx512Lanes) belongs to an unnamed namespace, so that what templates
// make of it stays in the file that is compiled for its instructions. It has
//   Floats     kLanes float32, with + - * / and the sign; load, store, broadcast, fma (a * b + c), less, select
//   Mask       what less gives and select takes
//   Words      kLanes x 32 bits: load_words; lower_bf16, upper_bf16, integers<shift, bits> make Floats of a part of each
//   sum_of_products, a * b + c * d: which product is rounded by itself differs between instruction sets
//   load       also of kLanes bfloat16 or int8
//   power      2^n of Floats to which 1.5 * 2^23 was added, whose low bits therefore hold the integer n
//   largest    size of some floats, NaN where there is one; round: see Kernels
//   kAccumulators, sums that stay in registers beside what is added to them
// A product and the sum behind it are one operation where `fma` says so, and nowhere else.
#pragma once

#include <cstdint>
#include <cstring>

#define QUASAR_INLINE inline __attribute__((always_inline))
// Loops over lanes, rows and accumulators are unrolled, so that what they add up stays in registers.
#if defined(__clang__)
#define QUASAR_UNROLL _Pragma("unroll")
#else
#define QUASAR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace quasar {

constexpr int kLanes = 16;  // of every instruction set, so that sums have one order

// The first n (at most 16) floats; the other lanes are zero.
template <class L>
QUASAR_INLINE typename L::Floats load_first(const float* from, int64_t n) {
  if (n >= kLanes) return L::load(from);
  float lane[kLanes] = {};
  std::memcpy(lane, from, sizeof(float) * static_cast<size_t>(n));
  return L::load(lane);
}

template <class L>
QUASAR_INLINE void store_first(float* to, typename L::Floats values, int64_t n) {
  if (n >= kLanes) return L::store(to, values);
  float lane[kLanes];
  L::store(lane, values);
  std::memcpy(to, lane, sizeof(float) * static_cast<size_t>(n));
}

template <class L>
QUASAR_INLINE typename L::Floats maximum(typename L::Floats a, typename L::Floats b) {
  return L::select(L::less(a, b), b, a);
}

// Lanes are added in halves: 16, 8, 4, 2, 1.
template <class L>
QUASAR_INLINE float sum_of(typename L::Floats values) {
  float lane[kLanes];
  L::store(lane, values);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

template <class L>
QUASAR_INLINE float largest_of(typename L::Floats values) {
  float lane[kLanes];
  L::store(lane, values);
  float result = lane[0];
  for (int i = 1; i < kLanes; ++i) result = result < lane[i] ? lane[i] : result;
  return result;
}

// e^x to about one unit in the last place; 0 below -87, e^88 above 88, NaN of NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its series: the remainder after r^7 / 7! is below 2^-27.
template <class L>
QUASAR_INLINE typename L::Floats exponential(typename L::Floats x) {
  using Floats = typename L::Floats;
  const auto all = [](float value) __attribute__((always_inline)) { return L::broadcast(value); };
  const Floats low = all(-87.0f), high = all(88.0f);
  const Floats clamped = L::select(L::less(high, x), high, L::select(L::less(x, low), low, x));
  const Floats rounder = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Floats shifted = L::fma(clamped, all(1.44269504f), rounder);
  const Floats n = shifted - rounder;
  const Floats r = L::fma(-n, all(1.42860677e-6f), L::fma(-n, all(0.693145752f), clamped));
  Floats series = all(1.0f / 5040);
  series = L::fma(series, r, all(1.0f / 720));
  series = L::fma(series, r, all(1.0f / 120));
  series = L::fma(series, r, all(1.0f / 24));
  series = L::fma(series, r, all(1.0f / 6));
  series = L::fma(series, r, all(0.5f));
  series = L::fma(series, r, all(1.0f));
  series = L::fma(series, r, all(1.0f));
  return L::select(L::less(x, low), all(0.0f), series * L::power(shifted));
}

}  // namespace quasar
