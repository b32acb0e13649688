// A weight matrix, packed in the order in which its product reads it.
#pragma once

#include <cstdint>
#include <memory>

#include "threads/pool.hpp"

namespace quasar {

enum class Activations { none, int8_per_token, int8_per_group, int8_static };

// weight ~ (values - zero_points) * scales, group by group along a row. Not owned; make_linear copies it.
struct WeightView {
  int64_t out, in, groups;    // in is a multiple of groups
  int bits;                   // that a value needs; at most 8
  const int8_t* values;       // [out, in]
  const float* scales;        // [out, groups]
  const float* zero_points;   // [out, groups] or nullptr
  const int64_t* input_order; // [in] or nullptr: column j multiplies input input_order[j]
  Activations activations;
  float input_scale;          // for int8_static
};

// Immutable, hence safe to use from several threads at once. Scratch memory belongs to the calling thread and is kept
// for its next call.
class Linear {
 public:
  virtual ~Linear() = default;
  virtual int64_t out() const = 0;
  virtual int64_t in() const = 0;
  // outputs[rows, out] = inputs[rows, in] * W^T. The bits of a row depend on that row of the inputs alone: not on the
  // other rows, their number or the number of threads. A row with an input that is not finite gets outputs of NaN, but
  // for int8_static, which cuts infinities off as it does all large values, and for "none", which follows IEEE 754.
  // `next` is what the pool's next loop reads.
  virtual void multiply(const float* inputs, int64_t rows, float* outputs, ThreadPool& pool,
                        Memory next = {}) const = 0;
  // Bytes of weights that one pass over up to `rows_per_pass` rows reads from memory.
  virtual int64_t bytes() const = 0;
  // The values among them, in the order in which a product reads them.
  virtual Memory values() const = 0;
};

// A quantized weight that can be given back as it was.
class QuantizedLinear : public Linear {
 public:
  virtual int64_t groups() const = 0;
  virtual bool has_zero_points() const = 0;
  // values [out, in], scales and zero_points [out, groups]; zero_points is not written where there are none.
  virtual void unpack(int8_t* values, float* scales, float* zero_points) const = 0;
};

struct Kernels;  // the products for one instruction set: kernels.hpp

// The widest instruction set of this CPU, or the one that the environment variable QUASAR_NATIVE_INSTRUCTIONS names.
const Kernels& default_kernels();

std::unique_ptr<QuantizedLinear> make_linear(const WeightView& weight, const Kernels& kernels = default_kernels());
std::unique_ptr<Linear> make_linear_f32(const float* weight, int64_t out, int64_t in,
                                        const Kernels& kernels = default_kernels());
std::unique_ptr<Linear> make_linear_bf16(const uint16_t* weight, int64_t out, int64_t in,
                                         const Kernels& kernels = default_kernels());

}  // namespace quasar
