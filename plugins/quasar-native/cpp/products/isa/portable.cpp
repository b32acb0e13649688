// Products for any CPU.
#include "products/lanes/portable.hpp"
#include "products/table.hpp"

namespace quasar {
namespace {

struct Portable : PortableLanes {
  static constexpr int kChannelRows = 2;
  static constexpr int kGroupRows = 2;
  static constexpr int kFloatRows = 2;
  static constexpr int kRowsOfTwoChains = 2;
  static constexpr bool kTotalsInMemory = false;

  // Floats, because few instruction sets have products of narrow integers for which compilers find them: all are exact.
  struct Bytes {
    Floats column[4];
  };
  struct Halves {
    Bytes low, high;
  };
  struct Sums {
    BitRegister part[kRegisters];  // wraps around on the way; the end fits
  };

  static constexpr int32_t kLess8 = 0;
  static Bytes load8(const uint8_t* unit) {
    const Words words = load_words(unit);
    return {{integers<0, 8>(words), integers<8, 8>(words), integers<16, 8>(words), integers<24, 8>(words)}};
  }
  static Halves load4(const uint8_t* unit) {
    const Words words = load_words(unit);
    return {{{integers<0, 4>(words), integers<8, 4>(words), integers<16, 4>(words), integers<24, 4>(words)}},
            {{integers<4, 4>(words), integers<12, 4>(words), integers<20, 4>(words), integers<28, 4>(words)}}};
  }
  static Sums sums_from(int32_t begin) {
    const auto all = static_cast<uint32_t>(begin);
    return each<Sums>([&](int) { return BitRegister{all, all, all, all}; });
  }
  static Floats products(const Bytes& weights, const int8_t* inputs) {
    const auto of = [&](int column) { return weights.column[column] * broadcast(float(inputs[column])); };
    return (of(0) + of(1)) + (of(2) + of(3));
  }
  static Sums dot(const Sums& sums, const Bytes& weights, const int8_t* inputs) {
    const Floats exact = products(weights, inputs);
    return each<Sums>([&](int i) {
      return sums.part[i] + bits<BitRegister>(__builtin_convertvector(exact.part[i], WordRegister));
    });
  }
  static Floats total(const Sums& sums) {
    return each([&](int i) { return to_floats(bits<WordRegister>(sums.part[i])); });
  }
};

}  // namespace

extern const Kernels kPortable = make_kernels<Portable>("portable");

}  // namespace quasar
