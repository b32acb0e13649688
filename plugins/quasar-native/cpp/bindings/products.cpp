// Products for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "products/dispatch.hpp"
#include "products/linear.hpp"

namespace nb = nanobind;

namespace quasar {
namespace {

Activations activations_named(const std::string& name) {
  if (name == "none") return Activations::none;
  if (name == "int8_per_token") return Activations::int8_per_token;
  if (name == "int8_per_group") return Activations::int8_per_group;
  if (name == "int8_static") return Activations::int8_static;
  throw std::invalid_argument("activations='" + name + "' is no scheme of this version");
}

const int64_t* checked_order(const Array<const int64_t, 1>& order, int64_t in) {
  require(static_cast<int64_t>(order.shape(0)) == in, "input_order has not one entry an input");
  for (int64_t i = 0; i < in; ++i) {
    require(order.data()[i] >= 0 && order.data()[i] < in, "input_order names an input that there is not");
  }
  return order.data();
}

std::unique_ptr<QuantizedLinear> pack(const Matrix<const int8_t>& values, const Matrix<const float>& scales,
                                      const std::optional<Matrix<const float>>& zero_points,
                                      const std::optional<Array<const int64_t, 1>>& input_order,
                                      const std::string& activations, float input_scale,
                                      const std::string& instructions) {
  WeightView weight{};
  weight.out = static_cast<int64_t>(values.shape(0));
  weight.in = static_cast<int64_t>(values.shape(1));
  weight.groups = static_cast<int64_t>(scales.shape(1));
  weight.bits = 8;
  require(scales.shape(0) == values.shape(0), "scales and values have not as many rows");
  weight.values = values.data();
  weight.scales = scales.data();
  if (zero_points) {
    require(zero_points->shape(0) == scales.shape(0) && zero_points->shape(1) == scales.shape(1),
            "zero_points and scales have not the same shape");
    weight.zero_points = zero_points->data();
  }
  if (input_order) weight.input_order = checked_order(*input_order, weight.in);
  weight.activations = activations_named(activations);
  weight.input_scale = input_scale;
  const Kernels& kernels = kernels_named(instructions);
  nb::gil_scoped_release unlocked;
  return make_linear(weight, kernels);
}

std::unique_ptr<Linear> pack_f32(const Matrix<const float>& weight, const std::string& instructions) {
  return make_linear_f32(weight.data(), static_cast<int64_t>(weight.shape(0)), static_cast<int64_t>(weight.shape(1)),
                         kernels_named(instructions));
}

// numpy and DLPack readers disagree about bfloat16; its bits come as 16-bit integers.
std::unique_ptr<Linear> pack_bf16(const Matrix<const int16_t>& bits, const std::string& instructions) {
  return make_linear_bf16(reinterpret_cast<const uint16_t*>(bits.data()), static_cast<int64_t>(bits.shape(0)),
                          static_cast<int64_t>(bits.shape(1)), kernels_named(instructions));
}

void multiply(const Linear& linear, const Matrix<const float>& inputs, const Matrix<float>& outputs, ThreadPool& pool) {
  require(static_cast<int64_t>(inputs.shape(1)) == linear.in(), "inputs have not the size that the weight multiplies");
  require(outputs.shape(0) == inputs.shape(0) && static_cast<int64_t>(outputs.shape(1)) == linear.out(),
          "outputs have not the shape of the product");
  const float* from = inputs.data();
  float* to = outputs.data();
  const auto rows = static_cast<int64_t>(inputs.shape(0));
  nb::gil_scoped_release unlocked;
  linear.multiply(from, rows, to, pool);
}

void unpack(const QuantizedLinear& linear, const Matrix<int8_t>& values, const Matrix<float>& scales,
            const std::optional<Matrix<float>>& zero_points) {
  require(static_cast<int64_t>(values.shape(0)) == linear.out() && static_cast<int64_t>(values.shape(1)) == linear.in(),
          "values have not the shape of the weight");
  require(static_cast<int64_t>(scales.shape(0)) == linear.out() &&
              static_cast<int64_t>(scales.shape(1)) == linear.groups(),
          "scales have not the shape of the weight's");
  require(zero_points.has_value() == linear.has_zero_points(), "zero_points where there are none, or none where there are");
  if (zero_points) {
    require(zero_points->shape(0) == scales.shape(0) && zero_points->shape(1) == scales.shape(1),
            "zero_points and scales have not the same shape");
  }
  linear.unpack(values.data(), scales.data(), zero_points ? zero_points->data() : nullptr);
}

}  // namespace

void bind_products(nb::module_& module) {
  nb::class_<ThreadPool>(module, "ThreadPool").def(nb::init<int>(), nb::arg("threads")).def_prop_ro("size", &ThreadPool::size);
  nb::class_<Linear>(module, "Linear")
      .def_prop_ro("shape", [](const Linear& linear) { return nb::make_tuple(linear.out(), linear.in()); })
      .def_prop_ro("nbytes", &Linear::bytes)
      .def("multiply", &multiply, nb::arg("inputs").noconvert(), nb::arg("outputs").noconvert(), nb::arg("pool"));
  nb::class_<QuantizedLinear, Linear>(module, "QuantizedLinear")
      .def("unpack", &unpack, nb::arg("values").noconvert(), nb::arg("scales").noconvert(), nb::arg("zero_points").noconvert().none());
  module.def("pack", &pack, nb::arg("values").noconvert(), nb::arg("scales").noconvert(), nb::arg("zero_points").noconvert().none(),
             nb::arg("input_order").noconvert().none(), nb::arg("activations"), nb::arg("input_scale"), nb::arg("instructions"));
  module.def("pack_f32", &pack_f32, nb::arg("weight").noconvert(), nb::arg("instructions"));
  module.def("pack_bf16", &pack_bf16, nb::arg("bits").noconvert(), nb::arg("instructions"));
  module.def("available_instructions", &available_instructions);
  module.def("chosen_instructions", [](const std::string& name) { return std::string(kernels_named(name).name); },
             nb::arg("name"));
}

}  // namespace quasar
