// Products for CPUs with AVX2 and the VNNI of 256 bits, as those of AVX-512 in halves.
#include "avx2_lanes.hpp"

namespace quasar {
namespace {

struct AvxVnni : Avx2Lanes {
  static constexpr int kChannelRows = 4;
  static constexpr int kGroupRows = 4;
  static constexpr int kFloatRows = 2;

  using Weights = Words;
  using Sums = Words;

  static Weights load8(const uint8_t* unit) { return load_words(unit); }
  static void load4(const uint8_t* unit, Weights& low, Weights& high) {
    const Words both = load_words(unit);
    low = {low_halves(both.low), low_halves(both.high)};
    high = {high_halves(both.low), high_halves(both.high)};
  }
  static Sums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Sums dot(Sums sums, Weights weights, const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    const __m256i wide = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(sums.low, weights.low, wide),
            _mm256_dpbusd_avx_epi32(sums.high, weights.high, wide)};
  }
  static Floats total(Sums sums, uint32_t correction) { return to_floats(sums.low, sums.high, correction); }
};

}  // namespace

extern const Kernels kAvxVnni = make_kernels<AvxVnni>("avx_vnni");

}  // namespace quasar
