// Lanes in the vectors that GCC and Clang have for every CPU: 16 are four registers, as compilers keep vectors that are
// wider than those of the CPU in memory.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "lanes.hpp"

namespace quasar {
namespace {

struct PortableLanes {
  static constexpr int kAccumulators = 6;
  static constexpr int kInRegister = 4, kRegisters = kLanes / kInRegister;
  typedef float FloatRegister __attribute__((vector_size(4 * kInRegister)));
  typedef int32_t WordRegister __attribute__((vector_size(4 * kInRegister)));
  typedef uint32_t BitRegister __attribute__((vector_size(4 * kInRegister)));

  struct Floats {
    FloatRegister part[kRegisters];

    friend QUASAR_INLINE Floats operator+(const Floats& a, const Floats& b) {
      return each([&](int i) __attribute__((always_inline)) { return a.part[i] + b.part[i]; });
    }
    friend QUASAR_INLINE Floats operator-(const Floats& a, const Floats& b) {
      return each([&](int i) __attribute__((always_inline)) { return a.part[i] - b.part[i]; });
    }
    friend QUASAR_INLINE Floats operator*(const Floats& a, const Floats& b) {
      return each([&](int i) __attribute__((always_inline)) { return a.part[i] * b.part[i]; });
    }
    friend QUASAR_INLINE Floats operator/(const Floats& a, const Floats& b) {
      return each([&](int i) __attribute__((always_inline)) { return a.part[i] / b.part[i]; });
    }
    friend QUASAR_INLINE Floats operator-(const Floats& a) {
      return each([&](int i) __attribute__((always_inline)) { return -a.part[i]; });
    }
  };
  struct Words {
    WordRegister part[kRegisters];
  };
  using Mask = Words;

  // Made register by register.
  template <class Result = Floats, class Operation>
  static QUASAR_INLINE Result each(const Operation& operation) {
    Result result;
    QUASAR_UNROLL
    for (int i = 0; i < kRegisters; ++i) result.part[i] = operation(i);
    return result;
  }
  template <class To, class From>
  static QUASAR_INLINE To bits(const From& value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
  }
  static QUASAR_INLINE FloatRegister to_floats(WordRegister words) {
    return __builtin_convertvector(words, FloatRegister);
  }

  static QUASAR_INLINE Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
  }
  static QUASAR_INLINE Floats load(const uint16_t* bfloat16) {
    int32_t words[kLanes];
    for (int i = 0; i < kLanes; ++i) words[i] = bfloat16[i];
    return lower_bf16(bits<Words>(words));
  }
  static QUASAR_INLINE Floats load(const int8_t* from) {
    int32_t words[kLanes];
    for (int i = 0; i < kLanes; ++i) words[i] = from[i];
    const Words whole = bits<Words>(words);
    return each([&](int i) __attribute__((always_inline)) { return to_floats(whole.part[i]); });
  }
  static QUASAR_INLINE void store(float* to, const Floats& values) { std::memcpy(to, &values, sizeof values); }
  static QUASAR_INLINE Floats broadcast(float value) {
    return each([&](int) __attribute__((always_inline)) { return FloatRegister{value, value, value, value}; });
  }
  // Rounded twice where the others round once: without the instruction, rounding once takes a call.
  static QUASAR_INLINE Floats fma(const Floats& a, const Floats& b, const Floats& c) { return a * b + c; }
  static QUASAR_INLINE Floats sum_of_products(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
    return a * b + c * d;
  }
  static QUASAR_INLINE Mask less(const Floats& a, const Floats& b) {
    return each<Mask>([&](int i) __attribute__((always_inline)) { return a.part[i] < b.part[i]; });
  }
  static QUASAR_INLINE Floats select(const Mask& mask, const Floats& yes, const Floats& no) {
    return each([&](int i) __attribute__((always_inline)) { return mask.part[i] ? yes.part[i] : no.part[i]; });
  }
  // The bits above the exponent leave the word in the shift, but for the 127 of its bias.
  static QUASAR_INLINE Floats power(const Floats& shifted) {
    const Words words = bits<Words>(shifted);
    return each([&](int i) __attribute__((always_inline)) { return bits<FloatRegister>((words.part[i] + 127) << 23); });
  }

  static QUASAR_INLINE Words load_words(const uint8_t* unit) {
    Words words;
    std::memcpy(&words, unit, sizeof words);
    return words;
  }
  static QUASAR_INLINE Floats lower_bf16(const Words& words) {
    return each([&](int i) __attribute__((always_inline)) { return bits<FloatRegister>(words.part[i] << 16); });
  }
  static QUASAR_INLINE Floats upper_bf16(const Words& words) {
    return each([&](int i) __attribute__((always_inline)) { return bits<FloatRegister>(words.part[i] & -65536); });
  }
  template <int kShift, int kBits>
  static QUASAR_INLINE Floats integers(const Words& words) {
    return each([&](int i) __attribute__((always_inline)) {
      // Unsigned, so that the topmost bits need no mask.
      const auto shifted = bits<BitRegister>(words.part[i]) >> kShift;
      return to_floats(bits<WordRegister>(kShift + kBits == 32 ? shifted : shifted & ((1u << kBits) - 1)));
    });
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
}  // namespace quasar
