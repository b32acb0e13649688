// Products for CPUs with AVX2 and FMA. Its product of 8 bits saturates, so bytes are widened to 16 first.
#include "avx2_lanes.hpp"

namespace quasar {
namespace {

struct Avx2 : Avx2Lanes {
  static constexpr int kChannelRows = 2;
  static constexpr int kGroupRows = 2;
  static constexpr int kFloatRows = 2;

  // Part i holds lanes 4i to 4i + 3, each with its 4 columns.
  struct Weights {
    __m256i part[4];
  };
  // Two sums a lane, of its first two columns and of its last two.
  struct Sums {
    __m256i part[4];
  };

  static Weights widen(__m256i low, __m256i high) {
    return {{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(low)), _mm256_cvtepu8_epi16(_mm256_extracti128_si256(low, 1)),
             _mm256_cvtepu8_epi16(_mm256_castsi256_si128(high)),
             _mm256_cvtepu8_epi16(_mm256_extracti128_si256(high, 1))}};
  }
  static Weights load8(const uint8_t* unit) { return widen(load_bytes(unit), load_bytes(unit + 32)); }
  static void load4(const uint8_t* unit, Weights& low, Weights& high) {
    const __m256i first = load_bytes(unit), second = load_bytes(unit + 32);
    low = widen(low_halves(first), low_halves(second));
    high = widen(high_halves(first), high_halves(second));
  }
  static Sums no_sums() {
    const __m256i zero = _mm256_setzero_si256();
    return {{zero, zero, zero, zero}};
  }
  static Sums dot(Sums sums, const Weights& weights, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    const __m256i wide = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
    for (int i = 0; i < 4; ++i) {
      sums.part[i] = _mm256_add_epi32(sums.part[i], _mm256_madd_epi16(weights.part[i], wide));
    }
    return sums;
  }
  static Floats total(const Sums& sums, uint32_t correction) {
    return to_floats(pairs(sums.part[0], sums.part[1]), pairs(sums.part[2], sums.part[3]), correction);
  }
  // hadd works within halves of a register; the permutation brings the lanes back into their order.
  static __m256i pairs(__m256i first, __m256i second) {
    return _mm256_permute4x64_epi64(_mm256_hadd_epi32(first, second), 0xd8);
  }
};

}  // namespace

extern const Kernels kAvx2 = make_kernels<Avx2>("avx2");

}  // namespace quasar
