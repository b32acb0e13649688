// Products in plain loops over lanes, which any compiler makes vectors of.
#include <cmath>
#include <limits>

#include "product.hpp"

namespace quasar {
namespace {

struct Portable {
  static constexpr int kChannelRows = 2;
  static constexpr int kGroupRows = 2;
  static constexpr int kFloatRows = 2;
  static constexpr int kRowsOfTwoChains = 2;
  static constexpr bool kTotalsInMemory = false;

  struct Floats {
    float lane[kLanes];
  };
  // Floats, because few instruction sets have products of narrow integers for which compilers find them: all are exact.
  struct Bytes {
    Floats column[4];
  };
  struct Halves {
    Bytes low, high;
  };
  struct Sums {
    uint32_t lane[kLanes];  // wraps around on the way; the end fits
  };
  struct Words {
    uint32_t lane[kLanes];
  };

  template <class Operation>
  static Floats map(const Operation& operation) {
    Floats result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = operation(i);
    return result;
  }

  static Floats load(const float* from) {
    return map([&](int i) { return from[i]; });
  }
  static void store(float* to, const Floats& values) {
    for (int i = 0; i < kLanes; ++i) to[i] = values.lane[i];
  }
  static Floats broadcast(float value) {
    return map([&](int) { return value; });
  }
  static Floats add(const Floats& a, const Floats& b) {
    return map([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static Floats subtract(const Floats& a, const Floats& b) {
    return map([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static Floats multiply(const Floats& a, const Floats& b) {
    return map([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  // Rounded twice where the others round once: without the instruction, rounding once takes a call.
  static Floats fma(const Floats& a, const Floats& b, const Floats& c) {
    return map([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
  }

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
    Sums sums;
    for (uint32_t& lane : sums.lane) lane = static_cast<uint32_t>(begin);
    return sums;
  }
  static Floats products(const Bytes& weights, const int8_t* inputs) {
    const float input[4] = {float(inputs[0]), float(inputs[1]), float(inputs[2]), float(inputs[3])};
    return map([&](int i) {
      return (weights.column[0].lane[i] * input[0] + weights.column[1].lane[i] * input[1]) +
             (weights.column[2].lane[i] * input[2] + weights.column[3].lane[i] * input[3]);
    });
  }
  static Sums add_exactly(Sums sums, const Floats& products) {
    for (int i = 0; i < kLanes; ++i) sums.lane[i] += static_cast<uint32_t>(static_cast<int32_t>(products.lane[i]));
    return sums;
  }
  static Sums dot(const Sums& sums, const Bytes& weights, const int8_t* inputs) {
    return add_exactly(sums, products(weights, inputs));
  }
  static Floats total(const Sums& sums) {
    return map([&](int i) { return float(static_cast<int32_t>(sums.lane[i])); });
  }

  static Words load_words(const uint8_t* unit) {
    Words words;
    std::memcpy(words.lane, unit, sizeof words.lane);
    return words;
  }
  static Floats lower_bf16(const Words& words) {
    return map([&](int i) { return from_bits(words.lane[i] << 16); });
  }
  static Floats upper_bf16(const Words& words) {
    return map([&](int i) { return from_bits(words.lane[i] & 0xffff0000u); });
  }
  template <int kShift, int kBits>
  static Floats integers(const Words& words) {
    return map([&](int i) { return float(static_cast<int32_t>(words.lane[i] >> kShift & ((1u << kBits) - 1))); });
  }
  static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  static float largest(const float* inputs, int64_t count) {
    float largest = 0;
    bool numbers = true;
    for (int64_t i = 0; i < count; ++i) {
      const float size = std::fabs(inputs[i]);
      numbers &= size == size;
      largest = size > largest ? size : largest;
    }
    return numbers ? largest : std::numeric_limits<float>::quiet_NaN();
  }
  static int32_t round(const float* inputs, int64_t count, float scale, int8_t* values) {
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float quotient = inputs[i] / scale;
      values[i] = static_cast<int8_t>(std::nearbyint(quotient < -127 ? -127 : quotient > 127 ? 127 : quotient));
      sum += values[i];
    }
    return sum;
  }
};

}  // namespace

extern const Kernels kPortable = make_kernels<Portable>("portable");

}  // namespace quasar
