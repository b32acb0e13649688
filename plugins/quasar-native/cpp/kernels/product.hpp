// The products, written once for all instruction sets.
//
// `Isa` is a type of an unnamed namespace, so that what is made of these templates stays in its own file. It has
//   Floats     kLanes float32, with load, store, broadcast, add, subtract, multiply and fma (a * b + c)
//   Weights    kLanes x 4 unsigned bytes; load8 reads them, load4 makes two of kLanes x 8 halves of bytes
//   Sums       kLanes int32 in the making; dot adds the products of Weights with 4 int8; total ends it as Floats
//   Words      kLanes x 32 bits; lower_bf16, upper_bf16 and integers make Floats of a part of each
//   largest and round, see Kernels, and how many rows a pass serves: kIntegerRows, kFloatRows
#pragma once

#include <cstring>

#include "kernels.hpp"

namespace quasar {

template <class Isa>
void store_lanes(float* to, typename Isa::Floats values, int64_t lanes) {
  if (lanes >= kLanes) return Isa::store(to, values);
  float buffer[kLanes];
  Isa::store(buffer, values);
  std::memcpy(to, buffer, static_cast<size_t>(lanes) * sizeof(float));
}

// Integer sums of one group: exact, so their order does not matter.
template <class Isa, int kRows, Format kFormat>
inline const uint8_t* add_group(const uint8_t* unit, const int8_t* const (&rows)[kRows], int64_t begin, int64_t columns,
                                typename Isa::Sums (&sums)[kRows]) {
  for (int row = 0; row < kRows; ++row) sums[row] = Isa::no_sums();
  if constexpr (kFormat == Format::int8) {
    for (int64_t column = begin; column < begin + columns; column += 4, unit += kLanes * 4) {
      const typename Isa::Weights weights = Isa::load8(unit);
      for (int row = 0; row < kRows; ++row) sums[row] = Isa::dot(sums[row], weights, rows[row] + column);
    }
  } else {
    for (int64_t column = begin; column < begin + columns; column += 8, unit += kLanes * 4) {
      typename Isa::Weights low, high;
      Isa::load4(unit, low, high);
      for (int row = 0; row < kRows; ++row) {
        sums[row] = Isa::dot(Isa::dot(sums[row], low, rows[row] + column), high, rows[row] + column + 4);
      }
    }
  }
  return unit;
}

// outputs = sum over groups of ((sums - zero_point * row's sum) * scale [* row's scale of the group]) [* row's scale],
// in this order of operations, group by group: what every instruction set computes alike.
template <class Isa, int kRows, Format kFormat, bool kZeroPoints, bool kPerGroup>
inline void integer_block(const PackedWeight& weight, const QuantizedRows& inputs, int64_t first, int64_t block,
                          float* outputs) {
  using Floats = typename Isa::Floats;
  const int64_t columns = weight.groups * weight.group_columns;
  const int8_t* rows[kRows];
  Floats totals[kRows];
  for (int row = 0; row < kRows; ++row) {
    rows[row] = inputs.values + (first + row) * columns;
    totals[row] = Isa::broadcast(-0.0f);  // the one neutral element of addition
  }
  const uint8_t* unit = static_cast<const uint8_t*>(weight.blocks) + block * weight.block_bytes;
  for (int64_t group = 0; group < weight.groups; ++group) {
    typename Isa::Sums sums[kRows];
    unit = add_group<Isa, kRows, kFormat>(unit, rows, group * weight.group_columns, weight.group_columns, sums);
    const int64_t at = (block * weight.groups + group) * kLanes;
    const Floats scales = Isa::load(weight.scales + at);
    for (int row = 0; row < kRows; ++row) {
      const int64_t of_row = (first + row) * weight.groups + group;
      const int32_t row_sum = inputs.sums[of_row];
      Floats part = Isa::total(sums[row], static_cast<uint32_t>(weight.base) * static_cast<uint32_t>(row_sum));
      if constexpr (kZeroPoints) {
        const Floats offset = Isa::multiply(Isa::load(weight.zero_points + at), Isa::broadcast(float(row_sum)));
        part = Isa::subtract(part, offset);
      }
      part = Isa::multiply(part, scales);
      if constexpr (kPerGroup) part = Isa::multiply(part, Isa::broadcast(inputs.scales[of_row]));
      totals[row] = Isa::add(totals[row], part);
    }
  }
  const int64_t lanes = weight.out - block * kLanes;
  for (int row = 0; row < kRows; ++row) {
    if constexpr (!kPerGroup) totals[row] = Isa::multiply(totals[row], Isa::broadcast(inputs.scales[first + row]));
    store_lanes<Isa>(outputs + (first + row) * weight.out + block * kLanes, totals[row], lanes);
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

template <class Isa, Format kFormat, bool kZeroPoints, bool kPerGroup>
struct IntegerPasses : Passes<IntegerPasses<Isa, kFormat, kZeroPoints, kPerGroup>> {
  const PackedWeight& weight;
  const QuantizedRows& inputs;
  int64_t block;
  float* outputs;

  IntegerPasses(const PackedWeight& w, const QuantizedRows& i, int64_t b, float* o)
      : weight(w), inputs(i), block(b), outputs(o) {}

  template <int kRows>
  void run(int64_t first) const {
    integer_block<Isa, kRows, kFormat, kZeroPoints, kPerGroup>(weight, inputs, first, block, outputs);
  }
};

template <class Isa, Format kFormat, bool kZeroPoints, bool kPerGroup>
void multiply_blocks(const PackedWeight& weight, const QuantizedRows& inputs, int64_t rows, BlockRange range,
                     float* outputs) {
  for (int64_t block = range.begin; block < range.end; ++block) {
    in_passes<Isa::kIntegerRows>(
        rows, IntegerPasses<Isa, kFormat, kZeroPoints, kPerGroup>(weight, inputs, block, outputs));
  }
}

template <class Isa, Format kFormat>
void multiply_integers(const PackedWeight& weight, const QuantizedRows& inputs, int64_t rows, BlockRange range,
                       float* outputs) {
  if (weight.zero_points != nullptr) {
    return inputs.per_group ? multiply_blocks<Isa, kFormat, true, true>(weight, inputs, rows, range, outputs)
                            : multiply_blocks<Isa, kFormat, true, false>(weight, inputs, rows, range, outputs);
  }
  return inputs.per_group ? multiply_blocks<Isa, kFormat, false, true>(weight, inputs, rows, range, outputs)
                          : multiply_blocks<Isa, kFormat, false, false>(weight, inputs, rows, range, outputs);
}

// One unit of a group times floats; each row has one chain of sums, in the order of the columns.
template <class Isa, int kRows, Format kFormat>
inline const uint8_t* add_float_unit(const uint8_t* unit, const float* const (&rows)[kRows], int64_t column,
                                     int32_t base, typename Isa::Floats zero_points,
                                     typename Isa::Floats (&sums)[kRows]) {
  using Floats = typename Isa::Floats;
  const auto add_column = [&](Floats weights, int64_t at) {
    for (int row = 0; row < kRows; ++row) sums[row] = Isa::fma(weights, Isa::broadcast(rows[row][at]), sums[row]);
  };
  if constexpr (kFormat == Format::f32) {
    add_column(Isa::load(reinterpret_cast<const float*>(unit)), column);
    return unit + kLanes * sizeof(float);
  } else if constexpr (kFormat == Format::bf16) {
    const typename Isa::Words words = Isa::load_words(unit);
    add_column(Isa::lower_bf16(words), column);
    add_column(Isa::upper_bf16(words), column + 1);
  } else {
    const typename Isa::Words words = Isa::load_words(unit);
    constexpr int kBits = kFormat == Format::int8 ? 8 : 4;
    for (int c = 0; c < 32 / kBits; ++c) {
      const int shift = kFormat == Format::int8 ? 8 * c : 8 * (c % 4) + 4 * (c / 4);
      const Floats integers = Isa::integers(words, shift, (1 << kBits) - 1, base);
      add_column(Isa::subtract(integers, zero_points), column + c);
    }
  }
  return unit + kLanes * 4;
}

// Floats are summed group by group: a chain along the columns of a group, and one along the groups.
template <class Isa, Format kFormat>
struct FloatPasses : Passes<FloatPasses<Isa, kFormat>> {
  const PackedWeight& weight;
  const float* inputs;
  int64_t block;
  float* outputs;

  FloatPasses(const PackedWeight& w, const float* i, int64_t b, float* o)
      : weight(w), inputs(i), block(b), outputs(o) {}

  static constexpr int64_t kUnitColumns =
      kFormat == Format::f32 ? 1 : kFormat == Format::bf16 ? 2 : kFormat == Format::int8 ? 4 : 8;

  template <int kRows>
  void run(int64_t first) const {
    using Floats = typename Isa::Floats;
    const int64_t columns = weight.groups * weight.group_columns;
    const float* rows[kRows];
    Floats totals[kRows];
    for (int row = 0; row < kRows; ++row) {
      rows[row] = inputs + (first + row) * columns;
      totals[row] = Isa::broadcast(-0.0f);
    }
    const uint8_t* unit = static_cast<const uint8_t*>(weight.blocks) + block * weight.block_bytes;
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int64_t at = (block * weight.groups + group) * kLanes;
      const Floats zeros = weight.zero_points ? Isa::load(weight.zero_points + at) : Isa::broadcast(0.0f);
      Floats sums[kRows];
      for (int row = 0; row < kRows; ++row) sums[row] = Isa::broadcast(-0.0f);
      const int64_t begin = group * weight.group_columns;
      for (int64_t column = begin; column < begin + weight.group_columns; column += kUnitColumns) {
        unit = add_float_unit<Isa, kRows, kFormat>(unit, rows, column, weight.base, zeros, sums);
      }
      for (int row = 0; row < kRows; ++row) {
        if constexpr (kFormat == Format::int8 || kFormat == Format::int4) {
          sums[row] = Isa::multiply(sums[row], Isa::load(weight.scales + at));
        }
        totals[row] = Isa::add(totals[row], sums[row]);
      }
    }
    const int64_t lanes = weight.out - block * kLanes;
    for (int row = 0; row < kRows; ++row) {
      store_lanes<Isa>(outputs + (first + row) * weight.out + block * kLanes, totals[row], lanes);
    }
  }
};

template <class Isa, Format kFormat>
void multiply_floats(const PackedWeight& weight, const float* inputs, int64_t rows, BlockRange range, float* outputs) {
  for (int64_t block = range.begin; block < range.end; ++block) {
    in_passes<Isa::kFloatRows>(rows, FloatPasses<Isa, kFormat>(weight, inputs, block, outputs));
  }
}

template <class Isa>
constexpr Kernels make_kernels(const char* name) {
  return {name,
          Isa::largest,
          Isa::round,
          multiply_integers<Isa, Format::int8>,
          multiply_integers<Isa, Format::int4>,
          {multiply_floats<Isa, Format::int8>, multiply_floats<Isa, Format::int4>, multiply_floats<Isa, Format::bf16>,
           multiply_floats<Isa, Format::f32>}};
}

}  // namespace quasar
