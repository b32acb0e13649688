// Lanes of AVX-512: 16 are one register.
#pragma once

#include <immintrin.h>

#include "lanes.hpp"

namespace quasar {
namespace {

struct Avx512Lanes {
  static constexpr int kAccumulators = 16;

  using Floats = __m512;
  using Mask = __mmask16;
  using Words = __m512i;

  static QUASAR_INLINE Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static QUASAR_INLINE Floats load(const uint16_t* bfloat16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bfloat16));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  static QUASAR_INLINE Floats load(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
  }
  static QUASAR_INLINE void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
  static QUASAR_INLINE Floats broadcast(float value) { return _mm512_set1_ps(value); }
  static QUASAR_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static QUASAR_INLINE Floats sum_of_products(Floats a, Floats b, Floats c, Floats d) { return fma(a, b, c * d); }
  static QUASAR_INLINE Mask less(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static QUASAR_INLINE Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_blend_ps(mask, no, yes); }
  // The bits above the exponent leave the word in the shift, but for the 127 of its bias.
  static QUASAR_INLINE Floats power(Floats shifted) {
    const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }

  static Words load_words(const uint8_t* unit) { return _mm512_loadu_si512(unit); }
  static Floats lower_bf16(Words words) { return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16)); }
  static Floats upper_bf16(Words words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
  }
  template <int kShift, int kBits>
  static Floats integers(Words words) {
    const __m512i shifted = _mm512_srli_epi32(words, kShift);
    if constexpr (kBits == 4) {
      // A look-up reads no more than the lowest four bits of its index.
      const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      return _mm512_permutexvar_ps(shifted, numbers);
    } else {
      return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32((1 << kBits) - 1)));
    }
  }

  static float largest(const float* inputs, int64_t count) {
    __m512 largest = _mm512_setzero_ps();
    unsigned no_numbers = 0;
    for (int64_t i = 0; i < count; i += 16) {
      const __m512 sizes = _mm512_abs_ps(_mm512_maskz_loadu_ps(tail(count - i), inputs + i));
      no_numbers |= _mm512_cmp_ps_mask(sizes, sizes, _CMP_UNORD_Q);
      largest = _mm512_max_ps(largest, sizes);
    }
    return no_numbers ? __builtin_nanf("") : _mm512_reduce_max_ps(largest);
  }
  static int32_t round(const float* inputs, int64_t count, float scale, int8_t* values) {
    const __m512 divisor = _mm512_set1_ps(scale), most = _mm512_set1_ps(127), least = _mm512_set1_ps(-127);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 lanes = tail(count - i);
      const __m512 quotients = _mm512_div_ps(_mm512_maskz_loadu_ps(lanes, inputs + i), divisor);
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_max_ps(_mm512_min_ps(quotients, most), least));
      sum = _mm512_add_epi32(sum, rounded);
      _mm512_mask_cvtepi32_storeu_epi8(values + i, lanes, rounded);
    }
    return _mm512_reduce_add_epi32(sum);
  }
  static __mmask16 tail(int64_t left) { return left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1); }
};

}  // namespace
}  // namespace quasar
