// Integers times integers, added up exactly.
#pragma once

#include "passes.hpp"

namespace quasar {

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
    store_block<Isa>(weight, first + row, block, Isa::total(sums[row]) * scales * row_scale,
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
        part = part - Isa::load(weight.zero_points + at) * row_sum;
      }
      part = part * scales;
      if constexpr (kPerGroup) part = part * Isa::broadcast(inputs.scales[of_rows + row]);
      totals[row] = totals[row] + part;
    }
  }
  QUASAR_UNROLL
  for (int row = 0; row < kRows; ++row) {
    if constexpr (!kPerGroup) totals[row] = totals[row] * Isa::broadcast(inputs.scales[first + row]);
    store_block<Isa>(weight, first + row, block, totals[row], product.outputs);
  }
}

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

}  // namespace quasar
