// Products for CPUs with AVX2 and the VNNI of 256 bits, as those of AVX-512 in halves.
#include "products/lanes/avx2.hpp"
#include "products/table.hpp"

namespace quasar {
namespace {

struct AvxVnni : Avx2Lanes {
  static constexpr int kChannelRows = 4;
  static constexpr int kGroupRows = 4;
  static constexpr int kFloatRows = 4;
  static constexpr int kRowsOfTwoChains = 2;
  static constexpr bool kTotalsInMemory = false;

  using Bytes = Words;
  struct Halves {
    Words low, high;
  };
  using Sums = Words;

  static constexpr int32_t kLess8 = 0;
  static Bytes load8(const uint8_t* unit) { return load_words(unit); }
  static Halves load4(const uint8_t* unit) {
    const Words both = load_words(unit);
    return {{low_halves(both.low), low_halves(both.high)}, {high_halves(both.low), high_halves(both.high)}};
  }
  static Sums sums_from(int32_t begin) { return {_mm256_set1_epi32(begin), _mm256_set1_epi32(begin)}; }
  static Sums dot(Sums sums, const Bytes& weights, const int8_t* inputs) {
    const __m256i four = broadcast_four(inputs);
    return {add_products(sums.low, weights.low, four), add_products(sums.high, weights.high, four)};
  }
  // As in AVX-512, GCC 12 copies every sum around the intrinsic.
  static __m256i add_products(__m256i sums, __m256i weights, __m256i inputs) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(weights), "x"(inputs));
    return sums;
  }
  static Floats total(const Sums& sums) { return to_floats(sums.low, sums.high); }
};

}  // namespace

extern const Kernels kAvxVnni = make_kernels<AvxVnni>("avx_vnni");

}  // namespace quasar
