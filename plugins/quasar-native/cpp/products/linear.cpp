#include "linear.hpp"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "packing.hpp"

namespace quasar {
namespace {

constexpr int64_t kRowsAtOnce = 256;              // bounds the scratch memory of a long prompt
constexpr int64_t kLongestGroup = int64_t{1} << 17;  // products of int8 then add up within 32 bits
constexpr int64_t kPartBytes = 16 << 10;          // of weights: below, handing a part over costs more than it saves
constexpr int64_t kPartsPerThread = 4;
constexpr int64_t kRowsInAPass = 8;

// What a call needs beside its arguments; each calling thread has its own and keeps it.
struct Scratch {
  Buffer<float> columns, panels;
  Buffer<int8_t> values, straight;
  Buffer<int32_t> begins;
  Buffer<float> sums, scales;
};

Scratch& scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

size_t product(int64_t a, int64_t b) { return static_cast<size_t>(a * b); }

void check_shape(int64_t out, int64_t in, int64_t groups) {
  if (out >= 1 && in >= 1 && groups >= 1 && in % groups == 0) return;
  throw std::invalid_argument("a weight of shape [" + std::to_string(out) + ", " + std::to_string(in) + "] in " +
                              std::to_string(groups) + " groups cannot be packed");
}

// Calls work(BlockRange) for parts of all blocks, which are long enough to be worth it.
template <class Work>
void over_blocks(const Packed& packed, int64_t rows, ThreadPool& pool, Memory next, const Work& work) {
  const int64_t blocks = packed.n_blocks();
  const int64_t passes = (rows + kRowsInAPass - 1) / kRowsInAPass;
  const int64_t wanted = pool.size() == 1 ? 1 : pool.size() * kPartsPerThread;
  const int64_t parts = std::clamp<int64_t>(packed.bytes() * passes / kPartBytes, 1, std::min(wanted, blocks));
  const auto run = [&](int64_t part) { work(BlockRange{blocks * part / parts, blocks * (part + 1) / parts}); };
  pool.parallel(parts, run, next);
}

// Calls work(row) for all rows. Those of one panel stay on one thread: they share its cache lines.
template <class Work>
void over_rows(int64_t rows, int64_t columns, ThreadPool& pool, const Work& work) {
  const int64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  const int64_t parts = std::clamp<int64_t>(rows * columns / kPartBytes, 1, std::min<int64_t>(panels, pool.size()));
  pool.parallel(parts, [&](int64_t part) {
    const int64_t end = std::min(rows, panels * (part + 1) / parts * kPanelRows);
    for (int64_t row = panels * part / parts * kPanelRows; row < end; ++row) work(row);
  });
}

// Puts the inputs of a row where the columns of a packed weight are; padding becomes zeros.
class Columns {
 public:
  Columns(const Packed& packed, const int64_t* order) : padded_(packed.columns()) {
    if (order == nullptr && padded_ == packed.in()) return;
    inputs_.assign(static_cast<size_t>(padded_), -1);
    for (int64_t column = 0; column < packed.in(); ++column) {
      inputs_[static_cast<size_t>(packed.place(column))] = order == nullptr ? column : order[column];
    }
  }

  // Inputs that lie right already are not copied.
  const float* arrange(const float* inputs, int64_t in, int64_t rows, ThreadPool& pool) const {
    if (inputs_.empty()) return inputs;
    float* arranged = scratch().columns.at_least(product(rows, padded_));
    over_rows(rows, padded_, pool, [&](int64_t row) {
      for (int64_t column = 0; column < padded_; ++column) {
        const int64_t input = inputs_[static_cast<size_t>(column)];
        arranged[row * padded_ + column] = input < 0 ? 0.0f : inputs[row * in + input];
      }
    });
    return arranged;
  }

 private:
  int64_t padded_;
  std::vector<int64_t> inputs_;
};

class PackedLinear : public QuantizedLinear {
 public:
  PackedLinear(Packed packed, const int64_t* order, Activations activations, float input_scale, const Kernels& kernels)
      : packed_(std::move(packed)),
        columns_(packed_, order),
        activations_(activations),
        input_scale_(input_scale),
        kernels_(kernels) {}

  int64_t out() const override { return packed_.view().out; }
  int64_t in() const override { return packed_.in(); }
  int64_t bytes() const override { return packed_.bytes(); }
  Memory values() const override { return {packed_.view().blocks, packed_.n_blocks() * packed_.view().block_bytes}; }

  void multiply(const float* inputs, int64_t rows, float* outputs, ThreadPool& pool, Memory next) const override {
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
      const int64_t n = std::min(kRowsAtOnce, rows - first);
      const float* arranged = columns_.arrange(inputs + first * in(), in(), n, pool);
      float* results = outputs + first * out();
      activations_ == Activations::none ? multiply_floats(arranged, n, results, pool, next)
                                        : multiply_integers(quantize(arranged, n, pool), n, results, pool, next);
    }
  }

  int64_t groups() const override { return packed_.view().groups; }
  bool has_zero_points() const override { return packed_.view().zero_points != nullptr; }
  void unpack(int8_t* values, float* scales, float* zero_points) const override {
    packed_.unpack(values, scales, zero_points);
  }

 private:
  void multiply_floats(const float* inputs, int64_t rows, float* outputs, ThreadPool& pool, Memory next) const {
    const auto multiply = kernels_.multiply_float[static_cast<int>(packed_.format())];
    const float* panels = rows == 1 ? inputs : put_into_panels(inputs, rows, pool);
    over_blocks(packed_, rows, pool, next,
                [&](BlockRange range) { multiply(packed_.view(), panels, rows, range, outputs); });
  }

  const float* put_into_panels(const float* inputs, int64_t rows, ThreadPool& pool) const {
    const int64_t columns = packed_.columns();
    float* panels = scratch().panels.at_least(product(rows, columns));
    over_rows(rows, columns, pool, [&](int64_t row) {
      const PlaceInPanel place = float_place_in_panel(row, rows, columns);
      float* to = panels + place.offset;
      for (int64_t column = 0; column < columns; ++column, to += place.step) *to = inputs[row * columns + column];
    });
    return panels;
  }

  void multiply_integers(const QuantizedRows& inputs, int64_t rows, float* outputs, ThreadPool& pool,
                         Memory next) const {
    const auto multiply = packed_.format() == Format::int8 ? kernels_.multiply_int8 : kernels_.multiply_int4;
    over_blocks(packed_, rows, pool, next,
                [&](BlockRange range) { multiply(packed_.view(), inputs, rows, range, outputs); });
  }

  QuantizedRows quantize(const float* inputs, int64_t rows, ThreadPool& pool) const {
    const int64_t groups = packed_.view().groups, columns = packed_.columns();
    const bool per_group = activations_ == Activations::int8_per_group;
    const QuantizedRows quantized{scratch().values.at_least(product(rows, columns)),
                                  scratch().begins.at_least(product(rows, groups)),
                                  scratch().sums.at_least(product(rows, groups)),
                                  scratch().scales.at_least(product(rows, per_group ? groups : 1)), per_group};
    int8_t* straight = rows == 1 ? quantized.values : scratch().straight.at_least(product(rows, columns));
    over_rows(rows, columns, pool, [&](int64_t row) {
      quantize_row(inputs + row * columns, row, rows, quantized, straight + row * columns);
      if (rows > 1) put_into_panel(straight + row * columns, columns, place_in_panel(row, rows, columns), quantized);
    });
    return quantized;
  }

  static void put_into_panel(const int8_t* row, int64_t columns, PlaceInPanel place, const QuantizedRows& quantized) {
    int8_t* to = quantized.values + place.offset;
    for (int64_t column = 0; column < columns; column += 4, to += place.step) std::memcpy(to, row + column, 4);
  }

  void quantize_row(const float* inputs, int64_t row, int64_t rows, const QuantizedRows& quantized,
                    int8_t* values) const {
    const int32_t less = packed_.format() == Format::int8 ? kernels_.less8 : 0;
    const uint32_t base = static_cast<uint32_t>(packed_.view().base + less);
    const int64_t groups = packed_.view().groups, size = packed_.view().group_columns;
    const int64_t scales = quantized.per_group ? groups : 1;
    for (int64_t group = 0; group < groups; ++group) {
      const float* of_group = inputs + group * size;
      float& scale = quantized.scales[group % scales * rows + row];
      if (group < scales) scale = scale_of(of_group, groups * size / scales);
      int32_t sum = 0;
      if (std::isnan(scale)) {
        std::fill_n(values + group * size, size, int8_t{0});
      } else {
        sum = kernels_.round(of_group, size, scale, values + group * size);
      }
      quantized.sums[group * rows + row] = static_cast<float>(sum);
      quantized.begins[group * rows + row] = static_cast<int32_t>(base * static_cast<uint32_t>(sum));
    }
  }

  float scale_of(const float* inputs, int64_t count) const {
    const float largest = kernels_.largest(inputs, count);
    if (activations_ == Activations::int8_static) return std::isnan(largest) ? largest : input_scale_;
    return largest <= FLT_MAX ? std::max(largest / 127, 1e-30f) : std::numeric_limits<float>::quiet_NaN();
  }

  Packed packed_;
  Columns columns_;
  Activations activations_;
  float input_scale_;
  const Kernels& kernels_;
};

}  // namespace

std::unique_ptr<QuantizedLinear> make_linear(const WeightView& weight, const Kernels& kernels) {
  check_shape(weight.out, weight.in, weight.groups);
  if (weight.in / weight.groups > kLongestGroup) {
    throw std::invalid_argument("a group of more than " + std::to_string(kLongestGroup) + " inputs");
  }
  return std::make_unique<PackedLinear>(Packed::of_integers(weight), weight.input_order, weight.activations,
                                        weight.input_scale, kernels);
}

std::unique_ptr<Linear> make_linear_f32(const float* weight, int64_t out, int64_t in, const Kernels& kernels) {
  check_shape(out, in, 1);
  return std::make_unique<PackedLinear>(Packed::of_f32(weight, out, in), nullptr, Activations::none, 0.0f, kernels);
}

std::unique_ptr<Linear> make_linear_bf16(const uint16_t* weight, int64_t out, int64_t in, const Kernels& kernels) {
  check_shape(out, in, 1);
  return std::make_unique<PackedLinear>(Packed::of_bf16(weight, out, in), nullptr, Activations::none, 0.0f, kernels);
}

}  // namespace quasar
