#include "projection.hpp"

namespace quasar {

void multiply(const Projection& projection, const float* inputs, int64_t rows, float* outputs, ThreadPool& pool,
              const RowKernels& kernels, Memory next) {
  const float* bias = projection.bias.empty() ? nullptr : projection.bias.data();
  for (size_t i = 0; i < projection.parts.size(); ++i) {
    const auto& part = projection.parts[i];
    const int64_t out = part->out();
    const bool last = i + 1 == projection.parts.size();
    part->multiply(inputs, rows, outputs, pool, last ? next : projection.parts[i + 1]->values());
    for (int64_t row = 0; bias != nullptr && row < rows; ++row) kernels.add(outputs + row * out, bias, out);
    outputs += rows * out;
    if (bias != nullptr) bias += out;
  }
}

Columns columns(const Projection& projection, float* outputs, int64_t rows, int64_t begin) {
  for (const auto& part : projection.parts) {
    if (begin < part->out()) return {outputs + begin, part->out()};
    begin -= part->out();
    outputs += rows * part->out();
  }
  return {nullptr, 0};
}

}  // namespace quasar
