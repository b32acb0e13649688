// Sixteen floats at a time, in whatever instructions the including file is compiled for.
//
// Everything here has internal linkage: files that are compiled for different instruction sets must not share code.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "row_kernels.hpp"

// Loops over lanes and accumulators must be unrolled, so that these stay in registers.
#if defined(__clang__)
#define QUASAR_INLINE inline __attribute__((always_inline))
#define QUASAR_UNROLL _Pragma("unroll")
#elif defined(__GNUC__)
#define QUASAR_INLINE inline __attribute__((always_inline))
#define QUASAR_UNROLL _Pragma("GCC unroll 16")
#else
#define QUASAR_INLINE inline
#define QUASAR_UNROLL
#endif

namespace quasar {
namespace {

constexpr int kLanes = 16;

#if defined(__GNUC__) && !defined(QUASAR_PLAIN_LANES)
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using IntLanes = int32_t __attribute__((vector_size(4 * kLanes)));
using ByteLanes = int8_t __attribute__((vector_size(kLanes)));
using ShortLanes = uint16_t __attribute__((vector_size(2 * kLanes)));

QUASAR_INLINE Lanes as_float(IntLanes values) { return __builtin_convertvector(values, Lanes); }
QUASAR_INLINE Lanes widen(ByteLanes values) { return __builtin_convertvector(values, Lanes); }
QUASAR_INLINE IntLanes widen(ShortLanes values) { return __builtin_convertvector(values, IntLanes); }
QUASAR_INLINE Lanes select(IntLanes mask, Lanes yes, Lanes no) { return mask ? yes : no; }
#else
// For other compilers: arrays, whose loops they turn into vector instructions.
template <class T>
struct Array {
  T lane[kLanes];
  T& operator[](int i) { return lane[i]; }
  T operator[](int i) const { return lane[i]; }
};
using Lanes = Array<float>;
using IntLanes = Array<int32_t>;
using ByteLanes = Array<int8_t>;
using ShortLanes = Array<uint16_t>;

template <class R, class T, class F>
QUASAR_INLINE R map(const T& a, const F& f) {
  R result;
  for (int i = 0; i < kLanes; ++i) result[i] = f(a[i], i);
  return result;
}
#define QUASAR_OPERATOR(op)                                                             \
  template <class T>                                                                    \
  QUASAR_INLINE Array<T> operator op(const Array<T>& a, const Array<T>& b) {            \
    return map<Array<T>>(a, [&](T x, int i) { return static_cast<T>(x op b[i]); });     \
  }                                                                                     \
  template <class T>                                                                    \
  QUASAR_INLINE Array<T> operator op(const Array<T>& a, T b) {                          \
    return map<Array<T>>(a, [&](T x, int) { return static_cast<T>(x op b); });          \
  }
QUASAR_OPERATOR(+)
QUASAR_OPERATOR(-)
QUASAR_OPERATOR(*)
QUASAR_OPERATOR(/)
QUASAR_OPERATOR(<<)
#undef QUASAR_OPERATOR
QUASAR_INLINE IntLanes operator<(const Lanes& a, const Lanes& b) {
  return map<IntLanes>(a, [&](float x, int i) { return x < b[i] ? -1 : 0; });
}
QUASAR_INLINE Lanes operator-(const Lanes& a) {
  return map<Lanes>(a, [](float x, int) { return -x; });
}
QUASAR_INLINE Lanes& operator+=(Lanes& a, const Lanes& b) { return a = a + b; }
QUASAR_INLINE Lanes as_float(const IntLanes& values) {
  return map<Lanes>(values, [](int32_t x, int) { return static_cast<float>(x); });
}
QUASAR_INLINE Lanes widen(const ByteLanes& values) {
  return map<Lanes>(values, [](int8_t x, int) { return static_cast<float>(x); });
}
QUASAR_INLINE IntLanes widen(const ShortLanes& values) {
  return map<IntLanes>(values, [](uint16_t x, int) { return static_cast<int32_t>(x); });
}
QUASAR_INLINE Lanes select(const IntLanes& mask, const Lanes& yes, const Lanes& no) {
  return map<Lanes>(yes, [&](float x, int i) { return mask[i] ? x : no[i]; });
}
#endif

template <class To, class From>
QUASAR_INLINE To bits(const From& value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}

QUASAR_INLINE Lanes broadcast(float value) {
  Lanes result{};
  return result + value;
}

QUASAR_INLINE Lanes load(const float* from) {
  Lanes result;
  __builtin_memcpy(&result, from, sizeof(result));
  return result;
}

QUASAR_INLINE void store(float* to, Lanes values) { __builtin_memcpy(to, &values, sizeof(values)); }

// The first n (at most 16) floats; the other lanes are zero.
QUASAR_INLINE Lanes load(const float* from, int64_t n) {
  if (n >= kLanes) return load(from);
  Lanes result{};
  __builtin_memcpy(&result, from, sizeof(float) * n);
  return result;
}

QUASAR_INLINE void store(float* to, Lanes values, int64_t n) {
  if (n >= kLanes) return store(to, values);
  __builtin_memcpy(to, &values, sizeof(float) * n);
}

QUASAR_INLINE Lanes load(const uint16_t* bfloat16) {
  ShortLanes values;
  __builtin_memcpy(&values, bfloat16, sizeof(values));
  return bits<Lanes>(widen(values) << 16);
}

QUASAR_INLINE Lanes load(const int8_t* from) {
#if defined(__AVX512F__)  // compilers widen bytes one by one
  return bits<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  __m256 halves[2];
  for (int i = 0; i < 2; ++i) {
    const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i));
    halves[i] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(half));
  }
  return bits<Lanes>(halves);
#endif
  ByteLanes values;
  __builtin_memcpy(&values, from, sizeof(values));
  return widen(values);
}

QUASAR_INLINE Lanes maximum(Lanes a, Lanes b) { return select(a < b, b, a); }

// Lanes are added in halves: 16, 8, 4, 2, 1.
QUASAR_INLINE float sum(Lanes values) {
  float lane[kLanes];
  __builtin_memcpy(lane, &values, sizeof(lane));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}

QUASAR_INLINE float largest(Lanes values) {
  float result = values[0];
  for (int i = 1; i < kLanes; ++i) result = result < values[i] ? values[i] : result;
  return result;
}

// e^x to about one unit in the last place; 0 below -87, e^88 above 88, NaN of NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its series: the remainder after r^7 / 7! is below 2^-27.
QUASAR_INLINE Lanes exponential(Lanes x) {
  const Lanes low = broadcast(-87.0f), high = broadcast(88.0f);
  const Lanes clamped = select(high < x, high, select(x < low, low, x));
  const Lanes rounder = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Lanes shifted = clamped * 1.44269504f + rounder;
  const Lanes n = shifted - rounder;
  const Lanes r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f;
  Lanes series = broadcast(1.0f / 5040);
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  // shifted's low bits hold n; its other bits leave the word in the shift, but for the 127 of the exponent's bias.
  const IntLanes exponent = (bits<IntLanes>(shifted) + 127) << 23;
  const Lanes result = series * bits<Lanes>(exponent);
  return select(x < low, Lanes{}, result);
}

}  // namespace
}  // namespace quasar
