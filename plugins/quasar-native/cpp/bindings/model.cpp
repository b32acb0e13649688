// Models for Python: put together by a builder, and constant from then on.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "arrays.hpp"
#include "engine/model.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace quasar {
namespace {

using Linears = std::vector<std::shared_ptr<Linear>>;
using FloatVector = Array<const float, 1>;

struct ModelBuilder {
  Model model;

  std::shared_ptr<const Model> build() {
    model.check();
    return std::make_shared<const Model>(model);
  }
};

Vector vector_of(const FloatVector& values) { return Vector(values.data(), values.data() + values.shape(0)); }

Projection projection_of(const Linears& weights, const std::optional<FloatVector>& bias) {
  return {weights, bias ? vector_of(*bias) : Vector()};
}

template <auto member, class Class>
void bind_vector(Class& bound, const char* name) {
  bound.def(
      name, [](Layer& layer, const FloatVector& values) { layer.*member = vector_of(values); }, "values"_a.noconvert());
}

template <auto member, class Class>
void bind_projection(Class& bound, const char* name) {
  bound.def(
      name,
      [](Layer& layer, const Linears& weights, const std::optional<FloatVector>& bias) {
        layer.*member = projection_of(weights, bias);
      },
      "weights"_a, "bias"_a.noconvert() = nb::none());
}

// A number of the model that the builder is given.
template <auto member, class Class>
void bind_size(Class& bound, const char* name) {
  using Value = std::remove_reference_t<decltype(std::declval<Model>().*member)>;
  bound.def_prop_rw(
      name, [](const ModelBuilder& builder) { return builder.model.*member; },
      [](ModelBuilder& builder, Value value) { builder.model.*member = value; });
}

void bind_layer(nb::module_& module) {
  nb::class_<Layer> layer(module, "Layer");
  layer.def(nb::init<>()).def_rw("window", &Layer::window).def_rw("rope", &Layer::rope);
  bind_vector<&Layer::input_norm>(layer, "set_input_norm");
  bind_vector<&Layer::post_attention_norm>(layer, "set_post_attention_norm");
  bind_vector<&Layer::pre_mlp_norm>(layer, "set_pre_mlp_norm");
  bind_vector<&Layer::post_mlp_norm>(layer, "set_post_mlp_norm");
  bind_vector<&Layer::query_norm>(layer, "set_query_norm");
  bind_vector<&Layer::key_norm>(layer, "set_key_norm");
  bind_projection<&Layer::qkv>(layer, "set_qkv");
  bind_projection<&Layer::attention_out>(layer, "set_attention_out");
  bind_projection<&Layer::gate_up>(layer, "set_gate_up");
  bind_projection<&Layer::down>(layer, "set_down");
}

void set_activation(ModelBuilder& builder, const std::string& name) {
  require(name == "silu" || name == "gelu_tanh", "unknown activation: " + name);
  builder.model.activation = name == "silu" ? Activation::silu : Activation::gelu_tanh;
}

int add_rope(ModelBuilder& builder, const FloatVector& inverse_frequencies, float scaling) {
  builder.model.ropes.push_back({vector_of(inverse_frequencies), scaling});
  return static_cast<int>(builder.model.ropes.size()) - 1;
}

void bind_builder(nb::module_& module) {
  nb::class_<ModelBuilder> builder(module, "ModelBuilder");
  builder.def(nb::init<>());
  bind_size<&Model::vocab>(builder, "vocab");
  bind_size<&Model::hidden>(builder, "hidden");
  bind_size<&Model::intermediate>(builder, "intermediate");
  bind_size<&Model::heads>(builder, "heads");
  bind_size<&Model::key_value_heads>(builder, "key_value_heads");
  bind_size<&Model::head_dim>(builder, "head_dim");
  bind_size<&Model::max_length>(builder, "max_length");
  bind_size<&Model::epsilon>(builder, "epsilon");
  bind_size<&Model::attention_scaling>(builder, "attention_scaling");
  bind_size<&Model::attention_soft_cap>(builder, "attention_soft_cap");
  bind_size<&Model::logit_soft_cap>(builder, "logit_soft_cap");
  builder.def("set_activation", &set_activation, "name"_a)
      // The embedding is borrowed: its tensor lives as long as the builder, and that as long as what it built.
      .def(
          "set_embedding",
          [](ModelBuilder& self, const Matrix<const float>& weight, float scale) {
            self.model.embedding = {weight.data(), false, scale};
          },
          "weight"_a.noconvert(), "scale"_a, nb::keep_alive<1, 2>())
      .def(
          "set_bfloat16_embedding",
          [](ModelBuilder& self, const Matrix<const int16_t>& bits, float scale) {
            self.model.embedding = {bits.data(), true, scale};
          },
          "bits"_a.noconvert(), "scale"_a, nb::keep_alive<1, 2>())
      .def("add_rope", &add_rope, "inverse_frequencies"_a.noconvert(), "scaling"_a)
      .def("add_layer", [](ModelBuilder& self, const Layer& layer) { self.model.layers.push_back(layer); }, "layer"_a)
      .def("set_final_norm",
           [](ModelBuilder& self, const FloatVector& values) { self.model.final_norm = vector_of(values); },
           "values"_a.noconvert())
      .def("set_head",
           [](ModelBuilder& self, const Linears& weights, const std::optional<FloatVector>& bias) {
             self.model.head = projection_of(weights, bias);
           },
           "weights"_a, "bias"_a.noconvert() = nb::none())
      .def("build", &ModelBuilder::build, nb::keep_alive<0, 1>());
}

}  // namespace

void bind_model(nb::module_& module) {
  nb::class_<Model>(module, "Model")
      .def_ro("vocab", &Model::vocab)
      .def_ro("hidden", &Model::hidden)
      .def_prop_ro("layers", &Model::n_layers)
      .def_ro("max_length", &Model::max_length)
      .def_prop_ro("nbytes", &Model::bytes);
  bind_layer(module);
  bind_builder(module);
}

}  // namespace quasar
