// Weights as floats, or integers made floats, times floats: each sum in one order.
#pragma once

#include <utility>

#include "passes.hpp"

namespace quasar {

// Bits to shift a 32-bit word of an integer format by, to get at one of its columns.
template <Format kFormat>
constexpr int shift_to(int column) {
  return kFormat == Format::int8 ? 8 * column : 8 * (column % 4) + 4 * (column / 4);
}

// Column kAt of a unit of a float format, or of two units of float32; integers with their offset added.
template <class Isa, Format kFormat, int kAt>
QUASAR_INLINE typename Isa::Floats column_of(const uint8_t* unit, typename Isa::Floats offset) {
  if constexpr (kFormat == Format::f32) {
    return Isa::load(reinterpret_cast<const float*>(unit) + kAt * kLanes);
  } else if constexpr (kFormat == Format::bf16) {
    return kAt == 0 ? Isa::lower_bf16(Isa::load_words(unit)) : Isa::upper_bf16(Isa::load_words(unit));
  } else {
    constexpr int kBits = kFormat == Format::int8 ? 8 : 4;
    return Isa::template integers<shift_to<kFormat>(kAt), kBits>(Isa::load_words(unit)) + offset;
  }
}

// Adds the products of some columns of one group: of the even ones, the odd ones, or both. `inputs` is the place of the
// first row in a panel of floats, [columns][rows].
template <class Isa, int kRows, Format kFormat, bool kEven, bool kOdd>
QUASAR_INLINE void add_columns(const uint8_t* unit, const float* inputs, int64_t step, int64_t columns,
                               typename Isa::Floats offset, typename Isa::Floats* even, typename Isa::Floats* odd) {
  using Floats = typename Isa::Floats;
  const auto add_column = [&](Floats* chains, Floats weights) __attribute__((always_inline)) {
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) chains[row] = Isa::fma(weights, Isa::broadcast(inputs[row]), chains[row]);
  };
  constexpr int kBits = kFormat == Format::f32 ? 32 : kFormat == Format::bf16 ? 16 : kFormat == Format::int8 ? 8 : 4;
  constexpr int kUnitColumns = kFormat == Format::f32 ? 2 : 32 / kBits;
  constexpr int kLines = kFormat == Format::f32 ? 2 : 1;
  for (int64_t left = columns; left > 0; left -= kUnitColumns, unit += kLines * kLanes * 4) {
    for (int line = 0; kEven && line < kLines; ++line) fetch_ahead(unit + line * kLanes * 4);
    [&]<int... kColumn>(std::integer_sequence<int, kColumn...>) __attribute__((always_inline)) {
      const auto add = [&]<int kAt>() __attribute__((always_inline)) {
        if constexpr (kAt % 2 == 0 ? kEven : kOdd) {
          add_column(kAt % 2 == 0 ? even : odd, column_of<Isa, kFormat, kAt>(unit, offset));
        }
        inputs += step;
      };
      (add.template operator()<kColumn>(), ...);
    }(std::make_integer_sequence<int, kUnitColumns>{});
  }
}

// Sums of floats over one group: a row has two chains of them, of its even columns and of its odd ones, because one
// alone would wait for itself. Many rows do not, and the chains of all would not fit in the registers: there, all even
// columns come first.
template <class Isa, int kRows, Format kFormat>
QUASAR_INLINE void add_float_group(const uint8_t* unit, const float* inputs, int64_t step, int64_t columns,
                                   typename Isa::Floats offset, typename Isa::Floats* sums) {
  using Floats = typename Isa::Floats;
  Floats even[kRows], odd[kRows];
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) even[row] = odd[row] = Isa::broadcast(-0.0f);
  if constexpr (kRows <= Isa::kRowsOfTwoChains) {
    add_columns<Isa, kRows, kFormat, true, true>(unit, inputs, step, columns, offset, even, odd);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) sums[row] = even[row] + odd[row];
  } else {
    Floats kept[kRows];
    add_columns<Isa, kRows, kFormat, true, false>(unit, inputs, step, columns, offset, even, odd);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) kept[row] = even[row];
    asm("" : "+m"(kept));  // seen as one object in memory, they do not compete for registers with the other chains
    add_columns<Isa, kRows, kFormat, false, true>(unit, inputs, step, columns, offset, even, odd);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) sums[row] = kept[row] + odd[row];
  }
}

struct FloatProduct {
  const PackedWeight& weight;
  const float* inputs;
  int64_t rows;
  float* outputs;
};

// outputs = sum over groups of (sums of (integer - zero_point) * input) * scale, group by group; without scales for
// weights that are floats, whose groups only keep the chains short.
template <class Isa, int kRows, Format kFormat>
inline void float_block(const FloatProduct& product, int64_t first, int64_t block) {
  using Floats = typename Isa::Floats;
  constexpr bool kIntegers = kFormat == Format::int8 || kFormat == Format::int4;
  const PackedWeight& weight = product.weight;
  const PlaceInPanel place = float_place_in_panel(first, product.rows, weight.groups * weight.group_columns);
  const uint8_t* unit = static_cast<const uint8_t*>(weight.blocks) + block * weight.block_bytes;
  const float* inputs = product.inputs + place.offset;
  const int64_t group_bytes = weight.block_bytes / weight.groups;
  Floats totals[kRows];
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) totals[row] = Isa::broadcast(-0.0f);
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t at = (block * weight.groups + group) * kLanes;
    Floats offset = Isa::broadcast(static_cast<float>(weight.base));
    if (kIntegers && weight.zero_points != nullptr) offset = offset - Isa::load(weight.zero_points + at);
    Floats sums[kRows];
    add_float_group<Isa, kRows, kFormat>(unit, inputs, place.step, weight.group_columns, offset, sums);
    unit += group_bytes;
    inputs += weight.group_columns * place.step;
    if constexpr (kRows > Isa::kRowsOfTwoChains) asm("" : "+m"(totals));
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) {
      if constexpr (kIntegers) sums[row] = sums[row] * Isa::load(weight.scales + at);
      totals[row] = totals[row] + sums[row];
    }
  }
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) store_block<Isa>(weight, first + row, block, totals[row], product.outputs);
}

template <class Isa, Format kFormat>
struct FloatPasses : Passes<FloatPasses<Isa, kFormat>> {
  const FloatProduct& product;
  int64_t block;

  FloatPasses(const FloatProduct& p, int64_t b) : product(p), block(b) {}

  template <int kRows>
  void run(int64_t first) const {
    float_block<Isa, kRows, kFormat>(product, first, block);
  }
};

template <class Isa, Format kFormat>
void multiply_floats(const PackedWeight& weight, const float* inputs, int64_t rows, BlockRange range, float* outputs) {
  over_blocks<Isa::kFloatRows, FloatPasses<Isa, kFormat>>(FloatProduct{weight, inputs, rows, outputs}, range);
}

}  // namespace quasar
