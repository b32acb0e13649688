// What a product reads, and the table of products that each instruction set fills.
//
// Outputs lie in lanes: a block is kLanes rows of the weight, and each sum of a block runs along the inputs in one
// order, whatever the number of rows that are multiplied with it. Files that include this one are compiled for
// different instruction sets: what is inline in it must be inlined always, lest the linker keep the wrong copy.
#pragma once

#include <cstdint>

#include "lanes/lanes.hpp"

namespace quasar {

constexpr int kColumns = 8;     // a group is padded to a multiple of this number of columns
constexpr int kPanelRows = 16;  // rows of the input that lie side by side

enum class Format { int8, int4, bf16, f32 };

// Blocks follow each other; so do the groups of a block and the columns of a group. The unit of a group is
//   int8   4 columns, [kLanes][4] bytes
//   int4   8 columns, [kLanes][4] bytes: the low half of byte c is column c, the high half column c + 4
//   bf16   2 columns, [kLanes][2] words
//   f32    1 column, [kLanes] floats
// An integer is stored less `base`, so that it is not negative. The integers of padding are multiplied by zeros.
struct PackedWeight {
  const void* blocks;
  int64_t block_bytes;
  int64_t groups, group_columns;  // columns with their padding
  int32_t base;
  const float* scales;       // [blocks, groups, kLanes]
  const float* zero_points;  // [blocks, groups, kLanes] or nullptr
  int64_t out;
};

// Inputs in int8, in panels of kPanelRows rows, the last one of what is left: a panel is [columns / 4][its rows][4], so
// that a pass over a block reads it from end to end. Padding is zeros.
struct QuantizedRows {
  int8_t* values;
  int32_t* begins;  // [groups, rows] what a sum of products begins with, because stored integers lack the weight's base
  float* sums;      // [groups, rows] sums of the values
  float* scales;    // [groups, rows] or [1, rows]; NaN where an input was not finite
  bool per_group;   // which of the two
};

// Where the first four columns of a row lie, and how many bytes before its next four.
struct PlaceInPanel {
  int64_t offset, step;
};

QUASAR_INLINE PlaceInPanel place_in_panel(int64_t row, int64_t rows, int64_t columns) {
  const int64_t first = row / kPanelRows * kPanelRows;
  const int64_t in_panel = rows - first < kPanelRows ? rows - first : kPanelRows;
  return {first * columns + (row - first) * 4, in_panel * 4};
}

// The same for floats, whose panels are [columns][rows]; in elements.
QUASAR_INLINE PlaceInPanel float_place_in_panel(int64_t row, int64_t rows, int64_t columns) {
  const PlaceInPanel bytes = place_in_panel(row, rows, columns);
  const int64_t in_panel = row % kPanelRows;
  return {bytes.offset - 3 * in_panel, bytes.step / 4};
}

struct BlockRange {
  int64_t begin, end;
};

struct Kernels {
  const char* name;
  int32_t less8;  // what products of int8 take away from the stored integers
  // The largest size of `count` inputs, NaN where there is one.
  float (*largest)(const float* inputs, int64_t count);
  // values = inputs / scale, rounded half to even and cut off at -127 and 127; returns their sum. No input is NaN.
  int32_t (*round)(const float* inputs, int64_t count, float scale, int8_t* values);
  // outputs[rows, out], for the blocks of a range.
  void (*multiply_int8)(const PackedWeight&, const QuantizedRows&, int64_t rows, BlockRange, float* outputs);
  void (*multiply_int4)(const PackedWeight&, const QuantizedRows&, int64_t rows, BlockRange, float* outputs);
  // With inputs in panels of float32; indexed by Format.
  void (*multiply_float[4])(const PackedWeight&, const float* inputs, int64_t rows, BlockRange, float* outputs);
};

extern const Kernels kPortable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels kAvx2, kAvxVnni, kAvx512;
#endif

}  // namespace quasar
