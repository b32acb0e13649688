// The engine as Python sees it: weights, a model that is put together from them, and sessions over it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>

#include "errors.hpp"
#include "model.hpp"
#include "session.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace quasar {
namespace {

template <class T, size_t dimensions>
using Tensor = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = Tensor<const T, 2>;
using Linears = std::vector<std::shared_ptr<Linear>>;
using FloatVector = Tensor<const float, 1>;

CacheType cache_type_of(const std::string& name) {
  if (name == "float32") return CacheType::float32;
  if (name == "bfloat16") return CacheType::bfloat16;
  if (name == "int8") return CacheType::int8;
  throw std::invalid_argument("unknown type of cache: " + name);
}

Vector vector_of(const std::optional<FloatVector>& values) {
  return values ? Vector(values->data(), values->data() + values->shape(0)) : Vector();
}

Projection projection_of(const Linears& weights, const std::optional<FloatVector>& bias) {
  Projection projection;
  projection.parts = weights;
  projection.bias = vector_of(bias);
  return projection;
}

template <auto member, class Class>
void bind_vector(Class& bound, const char* name) {
  bound.def(
      name, [](Layer& layer, const FloatVector& values) { layer.*member = vector_of(values); }, "values"_a);
}

template <auto member, class Class>
void bind_projection(Class& bound, const char* name) {
  bound.def(
      name,
      [](Layer& layer, const Linears& weights, const std::optional<FloatVector>& bias) {
        layer.*member = projection_of(weights, bias);
      },
      "weights"_a, "bias"_a = nb::none());
}

void bind_layer(nb::module_& module) {
  nb::class_<Layer> layer(module, "Layer");
  layer.def(nb::init<>())
      .def_rw("window", &Layer::window)
      .def_rw("rope", &Layer::rope);
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

void bind_model(nb::module_& module) {
  nb::class_<Model>(module, "Model")
      .def(
          "__init__",
          [](Model* self, std::shared_ptr<ThreadPool> pool, const std::string& instructions) {
            new (self) Model(std::move(pool), row_kernels(instructions));
          },
          "pool"_a, "instructions"_a)
      .def_rw("vocab", &Model::vocab)
      .def_rw("hidden", &Model::hidden)
      .def_rw("intermediate", &Model::intermediate)
      .def_rw("heads", &Model::heads)
      .def_rw("key_value_heads", &Model::key_value_heads)
      .def_rw("head_dim", &Model::head_dim)
      .def_rw("max_length", &Model::max_length)
      .def_rw("epsilon", &Model::epsilon)
      .def_rw("attention_scaling", &Model::attention_scaling)
      .def_rw("attention_soft_cap", &Model::attention_soft_cap)
      .def_rw("logit_soft_cap", &Model::logit_soft_cap)
      .def("set_activation",
           [](Model& model, const std::string& name) {
             if (name != "silu" && name != "gelu_tanh") throw std::invalid_argument("unknown activation: " + name);
             model.activation = name == "silu" ? Activation::silu : Activation::gelu_tanh;
           })
      .def(
          "set_embedding",
          [](Model& model, const Matrix<float>& weight, float scale) {
            model.embedding = {weight.data(), false, scale};
          },
          "weight"_a, "scale"_a, nb::keep_alive<1, 2>())
      .def(
          "set_bfloat16_embedding",
          [](Model& model, const Matrix<int16_t>& weight, float scale) {
            model.embedding = {weight.data(), true, scale};
          },
          "weight"_a, "scale"_a, nb::keep_alive<1, 2>())
      .def("add_rope",
           [](Model& model, const FloatVector& inverse_frequencies, float scaling) {
             model.ropes.push_back({vector_of(inverse_frequencies), scaling});
             return static_cast<int>(model.ropes.size()) - 1;
           })
      .def("add_layer", [](Model& model, const Layer& layer) { model.layers.push_back(layer); })
      .def("set_final_norm", [](Model& model, const FloatVector& values) { model.final_norm = vector_of(values); })
      .def(
          "set_head",
          [](Model& model, const Linears& weights, const std::optional<FloatVector>& bias) {
            model.head = projection_of(weights, bias);
          },
          "weights"_a, "bias"_a = nb::none())
      .def("check", &Model::check)
      .def("bytes", &Model::bytes)
      .def_prop_ro("threads", [](const Model& model) { return model.pool->size(); });
}

// logits [n, vocab] and hidden states [n, hidden] are written.
void forward(Session& session, const Tensor<const int32_t, 1>& token_ids, const Tensor<float, 2>& logits,
             const std::optional<Tensor<float, 2>>& hidden) {
  const auto n = static_cast<int64_t>(token_ids.shape(0)), n_logits = static_cast<int64_t>(logits.shape(0));
  const Model& model = session.model();
  const bool fits = n_logits <= n && static_cast<int64_t>(logits.shape(1)) == model.vocab;
  if (!fits || (hidden && (hidden->shape(0) != logits.shape(0) ||
                           static_cast<int64_t>(hidden->shape(1)) != model.hidden))) {
    throw std::invalid_argument("outputs of a forward do not fit its tokens and the model");
  }
  float* states = hidden ? hidden->data() : nullptr;
  nb::gil_scoped_release release;
  session.forward(token_ids.data(), n, n_logits, logits.data(), states);
}

void bind_session(nb::module_& module) {
  nb::class_<Session>(module, "Session")
      .def(
          "__init__",
          [](Session* self, std::shared_ptr<Model> model, const std::string& cache) {
            model->check();
            new (self) Session(std::move(model), cache_type_of(cache));
          },
          "model"_a, "cache"_a)
      .def_prop_ro("length", &Session::length)
      .def("truncate", &Session::truncate)
      .def("forward", &forward, "token_ids"_a, "logits"_a, "hidden"_a = nb::none());
}

// Errors of the engine become those of quasar.errors.
void translate(const std::exception_ptr& error, void*) {
  const auto raise = [](const char* module, const char* name, const std::exception& cause) {
    PyErr_SetString(nb::module_::import_(module).attr(name).ptr(), cause.what());
  };
  try {
    std::rethrow_exception(error);
  } catch (const ContextOverflow& cause) {
    raise("quasar_native.errors", "ContextOverflowError", cause);
  } catch (const NotFinite& cause) {
    raise("quasar.errors", "NumericalError", cause);
  }
}

}  // namespace

void bind_engine(nb::module_& module) {
  // Caches of Python outlive the module; what they hold is freed with the process.
  nb::set_leak_warnings(false);
  bind_layer(module);
  bind_model(module);
  bind_session(module);
  nb::register_exception_translator(translate);
}

}  // namespace quasar
