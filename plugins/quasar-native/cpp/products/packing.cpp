#include "packing.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

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

// From one unit of a row to the next: those of all lanes lie in between.
constexpr int64_t kUnitStep = kLanes * 4;

// What is subtracted from a value that is stored in a whole byte; modulo 256 that is to flip its highest bit.
constexpr int32_t kByteBase = -128;
constexpr uint32_t kHighestBits = 0x80808080;

// Columns of one group of a row, from a place where a unit begins.
void put_bytes(const int8_t* values, int64_t n, int32_t, uint8_t* to) {
  uint32_t four;
  for (int64_t column = 0; column + 4 <= n; column += 4, to += kUnitStep) {
    std::memcpy(&four, values + column, 4);
    four ^= kHighestBits;
    std::memcpy(to, &four, 4);
  }
  for (int64_t i = 0; i < n % 4; ++i) to[i] = static_cast<uint8_t>(values[n - n % 4 + i] - kByteBase);
}

void put_halves(const int8_t* values, int64_t n, int32_t base, uint8_t* to) {
  const auto half = [&](int64_t column) { return static_cast<uint8_t>(values[column] - base); };
  int64_t column = 0;
  for (; column + 8 <= n; column += 8, to += kUnitStep) {
    for (int64_t i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(half(column + i) | half(column + 4 + i) << 4);
  }
  for (; column < n; ++column) to[column % 4] |= static_cast<uint8_t>(half(column) << (column % 8 >= 4 ? 4 : 0));
}

// The least of the values if all lie within 15 of it, so that the distances fit half a byte.
std::optional<int8_t> base_of_halves(const int8_t* values, int64_t n) {
  constexpr int64_t kPiece = 4096;
  int8_t least = INT8_MAX, most = INT8_MIN;
  for (int64_t first = 0; first < n; first += kPiece) {
    for (int64_t i = first; i < std::min(first + kPiece, n); ++i) {
      least = std::min(least, values[i]);
      most = std::max(most, values[i]);
    }
    if (most - least > 15) return std::nullopt;
  }
  return least;
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

uint8_t* Packed::group_of(int64_t row, int64_t group) const { return unit(row, group * view_.group_columns); }

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
  const std::optional<int8_t> least = base_of_halves(weight.values, weight.out * weight.in);
  const bool in_halves = least.has_value();
  Packed packed(in_halves ? Format::int4 : Format::int8, weight.out, weight.in, weight.in / weight.groups);
  packed.view_.base = in_halves ? *least : kByteBase;
  const auto put = in_halves ? put_halves : put_bytes;
  for (int64_t row = 0; row < weight.out; ++row) {
    for (int64_t group = 0; group < weight.groups; ++group) {
      const int8_t* values = weight.values + row * weight.in + group * packed.group_size_;
      put(values, packed.group_size_, packed.view_.base, packed.group_of(row, group));
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
  packed.put_floats(weight, 1);
  return packed;
}

Packed Packed::of_bf16(const uint16_t* weight, int64_t out, int64_t in) {
  Packed packed(Format::bf16, out, in, std::min(in, kFloatChain));
  packed.put_floats(weight, 2);
  return packed;
}

template <typename Float>
void Packed::put_floats(const Float* weight, int64_t in_unit) {
  for (int64_t row = 0; row < view_.out; ++row) {
    for (int64_t first = 0; first < in_; first += group_size_) {
      uint8_t* to = group_of(row, first / group_size_);
      const int64_t n = std::min(group_size_, in_ - first);
      for (int64_t column = 0; column < n; column += in_unit, to += kUnitStep) {
        std::memcpy(to, weight + row * in_ + first + column,
                    static_cast<size_t>(std::min(in_unit, n - column)) * sizeof(Float));
      }
    }
  }
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
