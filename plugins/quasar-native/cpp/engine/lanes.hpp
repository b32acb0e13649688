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

#if defined(__AVX512F__)
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using IntLanes = int32_t __attribute__((vector_size(4 * kLanes)));

QUASAR_INLINE Lanes as_float(IntLanes values) { return __builtin_convertvector(values, Lanes); }
QUASAR_INLINE Lanes select(IntLanes mask, Lanes yes, Lanes no) { return mask ? yes : no; }
#else
// Registers of the width that there is: compilers keep vectors that are wider in memory.
#if defined(__AVX2__)
constexpr int kInRegister = 8;
#else
constexpr int kInRegister = 4;
#endif
constexpr int kRegisters = kLanes / kInRegister;

template <class T>
struct Registers {
  typedef T Register __attribute__((vector_size(4 * kInRegister)));
  Register part[kRegisters];
};
using Lanes = Registers<float>;
using IntLanes = Registers<int32_t>;

template <class R, class F>
QUASAR_INLINE R map(const F& f) {
  R result;
  QUASAR_UNROLL for (int i = 0; i < kRegisters; ++i) result.part[i] = f(i);
  return result;
}
#define QUASAR_OPERATOR(op)                                                                               \
  template <class T>                                                                                      \
  QUASAR_INLINE Registers<T> operator op(const Registers<T>& a, const Registers<T>& b) {                  \
    return map<Registers<T>>([&](int i) __attribute__((always_inline)) { return a.part[i] op b.part[i]; });\
  }                                                                                                       \
  template <class T>                                                                                      \
  QUASAR_INLINE Registers<T> operator op(const Registers<T>& a, T b) {                                    \
    return map<Registers<T>>([&](int i) __attribute__((always_inline)) { return a.part[i] op b; });       \
  }
QUASAR_OPERATOR(+)
QUASAR_OPERATOR(-)
QUASAR_OPERATOR(*)
QUASAR_OPERATOR(/)
QUASAR_OPERATOR(<<)
#undef QUASAR_OPERATOR
QUASAR_INLINE IntLanes operator<(const Lanes& a, const Lanes& b) {
  return map<IntLanes>([&](int i) __attribute__((always_inline)) { return a.part[i] < b.part[i]; });
}
QUASAR_INLINE Lanes operator-(const Lanes& a) {
  return map<Lanes>([&](int i) __attribute__((always_inline)) { return -a.part[i]; });
}
QUASAR_INLINE Lanes& operator+=(Lanes& a, const Lanes& b) { return a = a + b; }
QUASAR_INLINE Lanes as_float(const IntLanes& values) {
  return map<Lanes>([&](int i) __attribute__((always_inline)) {
    return __builtin_convertvector(values.part[i], Lanes::Register);
  });
}
QUASAR_INLINE Lanes select(const IntLanes& mask, const Lanes& yes, const Lanes& no) {
  return map<Lanes>([&](int i) __attribute__((always_inline)) { return mask.part[i] ? yes.part[i] : no.part[i]; });
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
#if defined(__AVX512F__)  // compilers widen words and bytes one by one
  return bits<Lanes>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bfloat16))) << 16);
#elif defined(__AVX2__)
  return map<Lanes>([&](int i) __attribute__((always_inline)) {
    const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bfloat16 + 8 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(part), 16));
  });
#else
  int32_t words[kLanes];
  for (int i = 0; i < kLanes; ++i) words[i] = bfloat16[i];
  return bits<Lanes>(bits<IntLanes>(words) << 16);
#endif
}

QUASAR_INLINE Lanes load(const int8_t* from) {
#if defined(__AVX512F__)
  return bits<Lanes>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#elif defined(__AVX2__)
  return map<Lanes>([&](int i) __attribute__((always_inline)) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * i))));
  });
#else
  int32_t words[kLanes];
  for (int i = 0; i < kLanes; ++i) words[i] = from[i];
  return as_float(bits<IntLanes>(words));
#endif
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
  float lane[kLanes];
  store(lane, values);
  float result = lane[0];
  for (int i = 1; i < kLanes; ++i) result = result < lane[i] ? lane[i] : result;
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
