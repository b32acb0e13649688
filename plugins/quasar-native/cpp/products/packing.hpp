// The layouts of kernels.hpp, made of plain matrices.
#pragma once

#include "kernels.hpp"
#include "linear.hpp"
#include "memory/buffer.hpp"

namespace quasar {

// A packed weight and the memory that it lies in.
class Packed {
 public:
  // Integers whose range is at most 15 take half a byte.
  static Packed of_integers(const WeightView& weight);
  static Packed of_f32(const float* weight, int64_t out, int64_t in);
  static Packed of_bf16(const uint16_t* weight, int64_t out, int64_t in);

  const PackedWeight& view() const { return view_; }
  Format format() const { return format_; }
  // Where a column lies among those with padding.
  int64_t place(int64_t column) const { return column / group_size_ * view_.group_columns + column % group_size_; }
  int64_t in() const { return in_; }
  int64_t n_blocks() const { return (view_.out + kLanes - 1) / kLanes; }
  int64_t columns() const { return view_.groups * view_.group_columns; }  // with padding
  int64_t bytes() const;

  void unpack(int8_t* values, float* scales, float* zero_points) const;

 private:
  Packed(Format format, int64_t out, int64_t in, int64_t group_size);
  uint8_t* unit(int64_t row, int64_t padded_column) const;
  uint8_t* group_of(int64_t row, int64_t group) const;  // where its first unit of a row lies
  template <typename Float>
  void put_floats(const Float* weight, int64_t in_unit);
  uint8_t get(int64_t row, int64_t column) const;
  Buffer<float> by_lanes(const float* matrix) const;
  void from_lanes(const float* lanes, float* matrix) const;

  Format format_;
  int64_t in_, group_size_;
  PackedWeight view_;
  Buffer<uint8_t> blocks_;
  Buffer<float> scales_, zero_points_;
};

}  // namespace quasar
