// Products for CPUs with AVX-512 and its VNNI: 64 products of int8 in one instruction, added up in 32 bits.
#include <immintrin.h>

#include "product.hpp"

namespace quasar {
namespace {

struct Avx512 {
  static constexpr int kChannelRows = 16;
  static constexpr int kGroupRows = 8;
  static constexpr int kFloatRows = 16;
  static constexpr int kRowsOfTwoChains = 8;
  static constexpr bool kTotalsInMemory = false;

  using Floats = __m512;
  using Bytes = __m512i;
  struct Halves {
    __m512i low, high;
  };
  using Sums = __m512i;
  using Words = __m512i;

  static Floats load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, Floats values) { _mm512_storeu_ps(to, values); }
  static Floats broadcast(float value) { return _mm512_set1_ps(value); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  static constexpr int32_t kLess8 = 0;
  static Bytes load8(const uint8_t* unit) { return _mm512_loadu_si512(unit); }
  static Halves load4(const uint8_t* unit) {
    const __m512i both = _mm512_loadu_si512(unit), half = _mm512_set1_epi8(15);
    return {_mm512_and_si512(both, half), _mm512_and_si512(_mm512_srli_epi16(both, 4), half)};
  }
  static Sums sums_from(int32_t begin) { return _mm512_set1_epi32(begin); }
  // The intrinsic would do; GCC 12 copies every sum twice around it, and does not read `inputs` within the instruction.
  static Sums dot(Sums sums, Bytes weights, const int8_t* inputs) {
    using Four = const int8_t[4];
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*reinterpret_cast<Four*>(inputs)));
    return sums;
  }
  static Floats total(Sums sums) { return _mm512_cvtepi32_ps(sums); }

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

extern const Kernels kAvx512 = make_kernels<Avx512>("avx512");

}  // namespace quasar
