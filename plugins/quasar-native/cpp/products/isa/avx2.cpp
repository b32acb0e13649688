// Products for CPUs with AVX2 and FMA. Its product of unsigned with signed bytes adds two of them up in 16 bits: the
// sizes of weights, 128 at most, times inputs that have taken over the weights' signs, 127 at most, fit in.
#include "products/lanes/avx2.hpp"
#include "products/table.hpp"

namespace quasar {
namespace {

struct Avx2 : Avx2Lanes {
  static constexpr int kChannelRows = 4;
  static constexpr int kGroupRows = 4;
  static constexpr int kFloatRows = 4;
  static constexpr int kRowsOfTwoChains = 2;
  static constexpr bool kTotalsInMemory = true;

  struct Bytes {
    Words values, sizes;
  };
  struct Halves {
    Words low, high;
  };
  using Sums = Words;

  static constexpr int32_t kLess8 = 128;
  static Bytes load8(const uint8_t* unit) {
    const Words bytes = load_words(unit);
    const __m256i less = _mm256_set1_epi8(-128);
    const Words values{_mm256_xor_si256(bytes.low, less), _mm256_xor_si256(bytes.high, less)};
    return {values, {_mm256_abs_epi8(values.low), _mm256_abs_epi8(values.high)}};
  }
  static Halves load4(const uint8_t* unit) {
    const Words both = load_words(unit);
    return {{low_halves(both.low), low_halves(both.high)}, {high_halves(both.low), high_halves(both.high)}};
  }
  static Sums sums_from(int32_t begin) { return {_mm256_set1_epi32(begin), _mm256_set1_epi32(begin)}; }
  static Sums dot(const Sums& sums, const Bytes& weights, const int8_t* inputs) {
    const __m256i four = broadcast_four(inputs);
    return {add_pairs(sums.low, products(weights.sizes.low, weights.values.low, four)),
            add_pairs(sums.high, products(weights.sizes.high, weights.values.high, four))};
  }
  static __m256i products(__m256i sizes, __m256i signs, __m256i inputs) {
    return _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(inputs, signs));
  }
  // Four products of halves fit in 16 bits, too.
  static Sums dot(const Sums& sums, const Halves& weights, const int8_t* inputs, const int8_t* next) {
    const __m256i four = broadcast_four(inputs), next_four = broadcast_four(next);
    return {add_pairs(sums.low, _mm256_add_epi16(_mm256_maddubs_epi16(weights.low.low, four),
                                                 _mm256_maddubs_epi16(weights.high.low, next_four))),
            add_pairs(sums.high, _mm256_add_epi16(_mm256_maddubs_epi16(weights.low.high, four),
                                                  _mm256_maddubs_epi16(weights.high.high, next_four)))};
  }
  // As in AVX-512, GCC 12 copies sums around the intrinsic.
  static __m256i add_pairs(__m256i sums, __m256i pairs) {
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    return sums;
  }
  static Floats total(const Sums& sums) { return to_floats(sums.low, sums.high); }
};

}  // namespace

extern const Kernels kAvx2 = make_kernels<Avx2>("avx2");

}  // namespace quasar
