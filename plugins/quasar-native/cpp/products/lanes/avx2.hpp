// Lanes of the instruction sets of 256 bits, AVX2 and AVX2 with VNNI: 16 are two registers.
#pragma once

#include <immintrin.h>

#include "lanes.hpp"

namespace quasar {
namespace {

struct Avx2Lanes {
  static constexpr int kAccumulators = 6;

  struct Floats {
    __m256 low, high;

    friend QUASAR_INLINE Floats operator+(Floats a, Floats b) { return {a.low + b.low, a.high + b.high}; }
    friend QUASAR_INLINE Floats operator-(Floats a, Floats b) { return {a.low - b.low, a.high - b.high}; }
    friend QUASAR_INLINE Floats operator*(Floats a, Floats b) { return {a.low * b.low, a.high * b.high}; }
    friend QUASAR_INLINE Floats operator/(Floats a, Floats b) { return {a.low / b.low, a.high / b.high}; }
    friend QUASAR_INLINE Floats operator-(Floats a) { return {-a.low, -a.high}; }
  };
  using Mask = Floats;
  struct Words {
    __m256i low, high;
  };

  static QUASAR_INLINE Floats load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
  static QUASAR_INLINE Floats load(const uint16_t* bfloat16) {
    return {widened(bfloat16), widened(bfloat16 + 8)};
  }
  static QUASAR_INLINE Floats load(const int8_t* from) { return {widened(from), widened(from + 8)}; }
  static QUASAR_INLINE __m256 widened(const uint16_t* bfloat16) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bfloat16));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
  }
  static QUASAR_INLINE __m256 widened(const int8_t* from) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
  }
  static QUASAR_INLINE void store(float* to, Floats values) {
    _mm256_storeu_ps(to, values.low);
    _mm256_storeu_ps(to + 8, values.high);
  }
  static QUASAR_INLINE Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static QUASAR_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static QUASAR_INLINE Floats sum_of_products(Floats a, Floats b, Floats c, Floats d) { return fma(c, d, a * b); }
  static QUASAR_INLINE Mask less(Floats a, Floats b) {
    return {_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ), _mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ)};
  }
  static QUASAR_INLINE Floats select(Mask mask, Floats yes, Floats no) {
    return {_mm256_blendv_ps(no.low, yes.low, mask.low), _mm256_blendv_ps(no.high, yes.high, mask.high)};
  }
  static QUASAR_INLINE Floats power(Floats shifted) { return {power_of(shifted.low), power_of(shifted.high)}; }
  // The bits above the exponent leave the word in the shift, but for the 127 of its bias.
  static QUASAR_INLINE __m256 power_of(__m256 shifted) {
    const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  static Floats to_floats(__m256i low, __m256i high) { return {_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)}; }

  static __m256i load_bytes(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static __m256i broadcast_four(const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static __m256i low_halves(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
  static __m256i high_halves(__m256i bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }

  static Words load_words(const uint8_t* unit) { return {load_bytes(unit), load_bytes(unit + 32)}; }
  static Floats lower_bf16(Words words) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words.low, 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(words.high, 16))};
  }
  static Floats upper_bf16(Words words) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(words.low, mask)),
            _mm256_castsi256_ps(_mm256_and_si256(words.high, mask))};
  }
  template <int kShift, int kBits>
  static Floats integers(Words words) {
    const __m256i kept = _mm256_set1_epi32((1 << kBits) - 1);
    return to_floats(_mm256_and_si256(_mm256_srli_epi32(words.low, kShift), kept),
                     _mm256_and_si256(_mm256_srli_epi32(words.high, kShift), kept));
  }

  static float largest(const float* inputs, int64_t count) {
    __m256 largest = _mm256_setzero_ps(), no_numbers = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; i += 8) {
      const __m256 sizes = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_maskload_ps(inputs + i, tail(count - i)));
      no_numbers = _mm256_or_ps(no_numbers, _mm256_cmp_ps(sizes, sizes, _CMP_UNORD_Q));
      largest = _mm256_max_ps(largest, sizes);
    }
    return _mm256_movemask_ps(no_numbers) ? __builtin_nanf("") : largest_lane(largest);
  }
  static int32_t round(const float* inputs, int64_t count, float scale, int8_t* values) {
    const __m256 divisor = _mm256_set1_ps(scale), most = _mm256_set1_ps(127), least = _mm256_set1_ps(-127);
    int32_t sum = 0;
    for (int64_t i = 0; i < count; i += 8) {
      const __m256 quotients = _mm256_div_ps(_mm256_maskload_ps(inputs + i, tail(count - i)), divisor);
      int32_t rounded[8];
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded),
                          _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(quotients, most), least)));
      for (int64_t j = i; j < (i + 8 < count ? i + 8 : count); ++j) {
        sum += rounded[j - i];
        values[j] = static_cast<int8_t>(rounded[j - i]);
      }
    }
    return sum;
  }
  static __m256i tail(int64_t left) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(left > 8 ? 8 : static_cast<int32_t>(left)), lane);
  }
  static float largest_lane(__m256 values) {
    float lanes[8], largest = 0;
    _mm256_storeu_ps(lanes, values);
    for (const float lane : lanes) largest = lane > largest ? lane : largest;
    return largest;
  }
};

}  // namespace
}  // namespace quasar
