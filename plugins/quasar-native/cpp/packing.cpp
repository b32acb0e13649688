#include "packing.hpp"

#include <algorithm>

namespace quasar {
namespace {

// Floats are summed in chains of this length: shorter ones lose less to rounding.
constexpr int64_t kFloatChain = 64;

int64_t columns_in_unit(Format format) {
  switch (format) {
    case Format::int8: return 4;
    case Format::int4: return 8;
    case Format::bf16: return 2;
    case Format::f32: return 1;
  }
  return 0;
}

int64_t rounded_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

Packed::Packed(Format format, int64_t out, int64_t in, int64_t group_size)
    : format_(format), in_(in), group_size_(group_size), view_{} {
  view_.out = out;
  view_.groups = (in + group_size - 1) / group_size;
  view_.group_columns = rounded_up(group_size, kColumns);
  view_.block_bytes = columns() / columns_in_unit(format) * kLanes * 4;
  blocks_ = Buffer<uint8_t>::beside_others(static_cast<size_t>(n_blocks() * view_.block_bytes));
  blocks_.fill_with_zeros();
  view_.blocks = blocks_.data();
}

uint8_t* Packed::unit(int64_t row, int64_t padded_column) const {
  const int64_t unit = padded_column / columns_in_unit(format_);
  return blocks_.data() + row / kLanes * view_.block_bytes + (unit * kLanes + row % kLanes) * 4;
}

void Packed::put(int64_t row, int64_t column, uint8_t value) {
  const int64_t padded = place(column);
  const int shift = format_ == Format::int4 && padded % 8 >= 4 ? 4 : 0;
  unit(row, padded)[padded % 4] |= static_cast<uint8_t>(value << shift);
}

uint8_t Packed::get(int64_t row, int64_t column) const {
  const int64_t padded = place(column);
  const uint8_t byte = unit(row, padded)[padded % 4];
  if (format_ == Format::int8) return byte;
  return padded % 8 >= 4 ? byte >> 4 : byte & 15;
}

Buffer<float> Packed::by_lanes(const float* matrix) const {
  Buffer<float> lanes = Buffer<float>::beside_others(static_cast<size_t>(n_blocks() * view_.groups * kLanes));
  lanes.fill_with_zeros();
  for (int64_t row = 0; row < view_.out; ++row) {
    for (int64_t group = 0; group < view_.groups; ++group) {
      lanes.data()[(row / kLanes * view_.groups + group) * kLanes + row % kLanes] = matrix[row * view_.groups + group];
    }
  }
  return lanes;
}

void Packed::from_lanes(const float* lanes, float* matrix) const {
  for (int64_t row = 0; row < view_.out; ++row) {
    for (int64_t group = 0; group < view_.groups; ++group) {
      matrix[row * view_.groups + group] = lanes[(row / kLanes * view_.groups + group) * kLanes + row % kLanes];
    }
  }
}

Packed Packed::of_integers(const WeightView& weight) {
  const auto [least, most] = std::minmax_element(weight.values, weight.values + weight.out * weight.in);
  const bool in_halves = *most - *least <= 15;
  Packed packed(in_halves ? Format::int4 : Format::int8, weight.out, weight.in, weight.in / weight.groups);
  packed.view_.base = in_halves ? *least : -128;
  for (int64_t row = 0; row < weight.out; ++row) {
    for (int64_t column = 0; column < weight.in; ++column) {
      packed.put(row, column, static_cast<uint8_t>(weight.values[row * weight.in + column] - packed.view_.base));
    }
  }
  packed.scales_ = packed.by_lanes(weight.scales);
  packed.view_.scales = packed.scales_.data();
  if (weight.zero_points != nullptr) {
    packed.zero_points_ = packed.by_lanes(weight.zero_points);
    packed.view_.zero_points = packed.zero_points_.data();
  }
  return packed;
}

Packed Packed::of_f32(const float* weight, int64_t out, int64_t in) {
  Packed packed(Format::f32, out, in, std::min(in, kFloatChain));
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t column = 0; column < in; ++column) {
      std::memcpy(packed.unit(row, packed.place(column)), weight + row * in + column, sizeof(float));
    }
  }
  return packed;
}

Packed Packed::of_bf16(const uint16_t* weight, int64_t out, int64_t in) {
  Packed packed(Format::bf16, out, in, std::min(in, kFloatChain));
  for (int64_t row = 0; row < out; ++row) {
    for (int64_t column = 0; column < in; ++column) {
      std::memcpy(packed.unit(row, packed.place(column)) + packed.place(column) % 2 * 2, weight + row * in + column, sizeof(uint16_t));
    }
  }
  return packed;
}

int64_t Packed::bytes() const {
  return static_cast<int64_t>(blocks_.bytes() + scales_.bytes() + zero_points_.bytes());
}

void Packed::unpack(int8_t* values, float* scales, float* zero_points) const {
  for (int64_t row = 0; row < view_.out; ++row) {
    for (int64_t column = 0; column < in_; ++column) {
      values[row * in_ + column] = static_cast<int8_t>(get(row, column) + view_.base);
    }
  }
  from_lanes(view_.scales, scales);
  if (view_.zero_points != nullptr) from_lanes(view_.zero_points, zero_points);
}

}  // namespace quasar
