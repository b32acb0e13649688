// The products, written once for all instruction sets.
//
// `Isa` is a type of an unnamed namespace, so that what is made of these templates stays in its own file. It has
//   Floats     kLanes float32, with load, store, broadcast, add, subtract, multiply and fma (a * b + c)
//   Bytes      kLanes x 4 integers, which load8 reads less kLess8
//   Halves     kLanes x 8 integers, which load4 reads: the Bytes low and high, or what dot takes at once
//   Sums       kLanes int32 in the making; dot adds the products of Bytes with 4 int8, or of Halves with two times 4;
//              total ends it as Floats
//   Words      kLanes x 32 bits; lower_bf16, upper_bf16 and integers<shift, bits> make Floats of a part of each
//   largest and round, see Kernels; how many rows a pass serves: kChannelRows, kGroupRows, kFloatRows; of how many rows
//   the chains of even and of odd columns fit in the registers: kRowsOfTwoChains; and kTotalsInMemory, whether the sums
//   of one group need all registers
#pragma once

#include <cstring>
#include <utility>

#include "kernels.hpp"

// Loops over the rows of a pass: unrolled, so that their sums stay in registers.
#if defined(__clang__)
#define QUASAR_UNROLL _Pragma("unroll")
#else
#define QUASAR_UNROLL _Pragma("GCC unroll 16")
#endif

namespace quasar {

template <class Isa>
QUASAR_INLINE void store_lanes(float* to, typename Isa::Floats values, int64_t lanes) {
  if (lanes >= kLanes) return Isa::store(to, values);
  float buffer[kLanes];
  Isa::store(buffer, values);
  std::memcpy(to, buffer, static_cast<size_t>(lanes) * sizeof(float));
}

// Weights far enough ahead to arrive in time from memory, into the second cache; a block is followed by the next one.
template <class T>
QUASAR_INLINE void fetch_ahead(const T* unit) {
  constexpr int64_t kAhead = 8192;
  __builtin_prefetch(reinterpret_cast<const char*>(unit) + kAhead, 0, 2);
}

// Integer sums of one group: exact, so their order does not matter. `inputs` is the place of the first row, see
// place_in_panel; the others follow it, as do their `begins`.
template <class Isa, int kRows, Format kFormat>
QUASAR_INLINE void add_group(const uint8_t*& unit, const int8_t*& inputs, int64_t step, int64_t columns,
                             const int32_t* begins, typename Isa::Sums* sums) {
  typename Isa::Sums local[kRows];
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) local[row] = Isa::sums_from(begins[row]);
  constexpr int64_t kUnitColumns = kFormat == Format::int8 ? 4 : 8;
  const uint8_t* weights = unit;
  const int8_t* fours = inputs;
  for (int64_t left = columns; left > 0; left -= kUnitColumns, weights += kLanes * 4) {
    fetch_ahead(weights);
    if constexpr (kFormat == Format::int8) {
      const auto bytes = Isa::load8(weights);
      QUASAR_UNROLL
      for (int row = 0; row < kRows; ++row) local[row] = Isa::dot(local[row], bytes, fours + 4 * row);
      fours += step;
    } else {
      const auto halves = Isa::load4(weights);
      if constexpr (requires { Isa::dot(local[0], halves, fours, fours); }) {
        QUASAR_UNROLL
        for (int row = 0; row < kRows; ++row) {
          local[row] = Isa::dot(local[row], halves, fours + 4 * row, fours + step + 4 * row);
        }
        fours += 2 * step;
      } else {
        QUASAR_UNROLL
        for (int row = 0; row < kRows; ++row) local[row] = Isa::dot(local[row], halves.low, fours + 4 * row);
        fours += step;
        QUASAR_UNROLL
        for (int row = 0; row < kRows; ++row) local[row] = Isa::dot(local[row], halves.high, fours + 4 * row);
        fours += step;
      }
    }
  }
  unit = weights;
  inputs = fours;
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) sums[row] = local[row];
}

template <class Isa>
QUASAR_INLINE void store_block(const PackedWeight& weight, int64_t row, int64_t block, typename Isa::Floats values,
                               float* outputs) {
  store_lanes<Isa>(outputs + row * weight.out + block * kLanes, values, weight.out - block * kLanes);
}

// What the integer products have in common: a weight, inputs, and `rows` of them.
struct IntegerProduct {
  const PackedWeight& weight;
  const QuantizedRows& inputs;
  int64_t rows;
  float* outputs;
};

// One group and no zero points: outputs = (sums * scale) * row's scale.
template <class Isa, int kRows, Format kFormat>
inline void channel_block(const IntegerProduct& product, int64_t first, int64_t block) {
  const PackedWeight& weight = product.weight;
  const PlaceInPanel place = place_in_panel(first, product.rows, weight.group_columns);
  const uint8_t* unit = static_cast<const uint8_t*>(weight.blocks) + block * weight.block_bytes;
  const int8_t* fours = product.inputs.values + place.offset;
  typename Isa::Sums sums[kRows];
  add_group<Isa, kRows, kFormat>(unit, fours, place.step, weight.group_columns, product.inputs.begins + first, sums);
  const typename Isa::Floats scales = Isa::load(weight.scales + block * kLanes);
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) {
    const typename Isa::Floats row_scale = Isa::broadcast(product.inputs.scales[first + row]);
    store_block<Isa>(weight, first + row, block, Isa::multiply(Isa::multiply(Isa::total(sums[row]), scales), row_scale),
                     product.outputs);
  }
}

// outputs = sum over groups of ((sums - zero_point * row's sum) * scale [* row's scale of the group]) [* row's scale],
// in this order of operations, group by group: what every instruction set computes alike.
template <class Isa, int kRows, Format kFormat, bool kZeroPoints, bool kPerGroup>
inline void group_block(const IntegerProduct& product, int64_t first, int64_t block) {
  using Floats = typename Isa::Floats;
  const PackedWeight& weight = product.weight;
  const QuantizedRows& inputs = product.inputs;
  const PlaceInPanel place = place_in_panel(first, product.rows, weight.groups * weight.group_columns);
  const uint8_t* unit = static_cast<const uint8_t*>(weight.blocks) + block * weight.block_bytes;
  const int8_t* fours = inputs.values + place.offset;
  Floats totals[kRows];
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) totals[row] = Isa::broadcast(-0.0f);  // the one neutral element of addition
  for (int64_t group = 0; group < weight.groups; ++group) {
    const int64_t of_rows = group * product.rows + first;
    typename Isa::Sums sums[kRows];
    add_group<Isa, kRows, kFormat>(unit, fours, place.step, weight.group_columns, inputs.begins + of_rows, sums);
    // Seen as one object in memory, they do not compete with the sums of add_group.
    if constexpr (Isa::kTotalsInMemory) asm("" : "+m"(totals));
    const int64_t at = (block * weight.groups + group) * kLanes;
    const Floats scales = Isa::load(weight.scales + at);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) {
      Floats part = Isa::total(sums[row]);
      if constexpr (kZeroPoints) {
        const Floats row_sum = Isa::broadcast(inputs.sums[of_rows + row]);
        part = Isa::subtract(part, Isa::multiply(Isa::load(weight.zero_points + at), row_sum));
      }
      part = Isa::multiply(part, scales);
      if constexpr (kPerGroup) part = Isa::multiply(part, Isa::broadcast(inputs.scales[of_rows + row]));
      totals[row] = Isa::add(totals[row], part);
    }
  }
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) {
    if constexpr (!kPerGroup) totals[row] = Isa::multiply(totals[row], Isa::broadcast(inputs.scales[first + row]));
    store_block<Isa>(weight, first + row, block, totals[row], product.outputs);
  }
}

// Calls work.template run<rows>(first) until all rows are served, kMost at a time.
template <int kMost, class Work>
inline void in_passes(int64_t rows, const Work& work) {
  int64_t first = 0;
  for (; first + kMost <= rows; first += kMost) work.template run<kMost>(first);
  if constexpr (kMost > 1) {
    if (first < rows) work.template run_rest<kMost - 1>(first, rows - first);
  }
}

template <class Derived>
struct Passes {
  template <int kRows>
  inline void run_rest(int64_t first, int64_t rows) const {
    if (rows == kRows) return static_cast<const Derived*>(this)->template run<kRows>(first);
    if constexpr (kRows > 1) run_rest<kRows - 1>(first, rows);
  }
};

template <class Isa, Format kFormat>
struct ChannelPasses : Passes<ChannelPasses<Isa, kFormat>> {
  const IntegerProduct& product;
  int64_t block;

  ChannelPasses(const IntegerProduct& p, int64_t b) : product(p), block(b) {}

  template <int kRows>
  void run(int64_t first) const {
    channel_block<Isa, kRows, kFormat>(product, first, block);
  }
};

template <class Isa, Format kFormat, bool kZeroPoints, bool kPerGroup>
struct GroupPasses : Passes<GroupPasses<Isa, kFormat, kZeroPoints, kPerGroup>> {
  const IntegerProduct& product;
  int64_t block;

  GroupPasses(const IntegerProduct& p, int64_t b) : product(p), block(b) {}

  template <int kRows>
  void run(int64_t first) const {
    group_block<Isa, kRows, kFormat, kZeroPoints, kPerGroup>(product, first, block);
  }
};

// A pass stays within a panel: the number of its rows divides kPanelRows.
template <int kMost, class BlockPasses, class Product>
void over_blocks(const Product& product, BlockRange range) {
  static_assert(kPanelRows % kMost == 0);
  for (int64_t block = range.begin; block < range.end; ++block) in_passes<kMost>(product.rows, BlockPasses(product, block));
}

template <class Isa, Format kFormat>
void multiply_integers(const PackedWeight& weight, const QuantizedRows& inputs, int64_t rows, BlockRange range,
                       float* outputs) {
  const IntegerProduct product{weight, inputs, rows, outputs};
  if (weight.groups == 1 && weight.zero_points == nullptr) {
    return over_blocks<Isa::kChannelRows, ChannelPasses<Isa, kFormat>>(product, range);
  }
  constexpr int kMost = Isa::kGroupRows;
  if (weight.zero_points != nullptr) {
    return inputs.per_group ? over_blocks<kMost, GroupPasses<Isa, kFormat, true, true>>(product, range)
                            : over_blocks<kMost, GroupPasses<Isa, kFormat, true, false>>(product, range);
  }
  return inputs.per_group ? over_blocks<kMost, GroupPasses<Isa, kFormat, false, true>>(product, range)
                          : over_blocks<kMost, GroupPasses<Isa, kFormat, false, false>>(product, range);
}

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
    return Isa::add(Isa::template integers<shift_to<kFormat>(kAt), kBits>(Isa::load_words(unit)), offset);
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
    for (int row = 0; row < kRows; ++row) sums[row] = Isa::add(even[row], odd[row]);
  } else {
    Floats kept[kRows];
    add_columns<Isa, kRows, kFormat, true, false>(unit, inputs, step, columns, offset, even, odd);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) kept[row] = even[row];
    asm("" : "+m"(kept));  // seen as one object in memory, they do not compete for registers with the other chains
    add_columns<Isa, kRows, kFormat, false, true>(unit, inputs, step, columns, offset, even, odd);
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) sums[row] = Isa::add(kept[row], odd[row]);
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
    if (kIntegers && weight.zero_points != nullptr) offset = Isa::subtract(offset, Isa::load(weight.zero_points + at));
    Floats sums[kRows];
    add_float_group<Isa, kRows, kFormat>(unit, inputs, place.step, weight.group_columns, offset, sums);
    unit += group_bytes;
    inputs += weight.group_columns * place.step;
    if constexpr (kRows > Isa::kRowsOfTwoChains) asm("" : "+m"(totals));
    QUASAR_UNROLL
    for (int row = 0; row < kRows; ++row) {
      if constexpr (kIntegers) sums[row] = Isa::multiply(sums[row], Isa::load(weight.scales + at));
      totals[row] = Isa::add(totals[row], sums[row]);
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

template <class Isa>
constexpr Kernels make_kernels(const char* name) {
  return {name,
          Isa::kLess8,
          Isa::largest,
          Isa::round,
          multiply_integers<Isa, Format::int8>,
          multiply_integers<Isa, Format::int4>,
          {multiply_floats<Isa, Format::int8>, multiply_floats<Isa, Format::int4>, multiply_floats<Isa, Format::bf16>,
           multiply_floats<Isa, Format::f32>}};
}

}  // namespace quasar
