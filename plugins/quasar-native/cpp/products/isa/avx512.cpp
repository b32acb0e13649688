// Products for CPUs with AVX-512 and its VNNI: 64 products of int8 in one instruction, added up in 32 bits.
#include "products/lanes/avx512.hpp"
#include "products/table.hpp"

namespace quasar {
namespace {

struct Avx512 : Avx512Lanes {
  static constexpr int kChannelRows = 16;
  static constexpr int kGroupRows = 8;
  static constexpr int kFloatRows = 16;
  static constexpr int kRowsOfTwoChains = 8;
  static constexpr bool kTotalsInMemory = false;

  using Bytes = __m512i;
  struct Halves {
    __m512i low, high;
  };
  using Sums = __m512i;

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
};

}  // namespace

extern const Kernels kAvx512 = make_kernels<Avx512>("avx512");

}  // namespace quasar
