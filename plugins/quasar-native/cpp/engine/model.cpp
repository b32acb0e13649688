#include "model.hpp"

#include <stdexcept>
#include <string>

namespace quasar {
namespace {

void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("the model's ") + what + " does not fit its other sizes");
}

void expect_vector(const Vector& vector, int64_t size, const char* what) {
  expect(static_cast<int64_t>(vector.size()) == size, what);
}

void expect_projection(const Projection& projection, int64_t in, int64_t out, const char* what) {
  expect(!projection.parts.empty() && projection.out() == out, what);
  for (const auto& part : projection.parts) expect(part->in() == in, what);
  if (!projection.bias.empty()) expect_vector(projection.bias, out, what);
}

int64_t bytes_of(const Projection& projection) {
  int64_t bytes = 0;
  for (const auto& part : projection.parts) bytes += part->bytes();
  return bytes;
}

void check_layer(const Model& model, const Layer& layer) {
  const int64_t queries = model.query_columns();
  expect_vector(layer.input_norm, model.hidden, "input norm");
  expect_vector(layer.pre_mlp_norm, model.hidden, "norm before the MLP");
  if (!layer.post_attention_norm.empty()) expect_vector(layer.post_attention_norm, model.hidden, "attention norm");
  if (!layer.post_mlp_norm.empty()) expect_vector(layer.post_mlp_norm, model.hidden, "norm behind the MLP");
  if (!layer.query_norm.empty()) expect_vector(layer.query_norm, model.head_dim, "query norm");
  if (!layer.key_norm.empty()) expect_vector(layer.key_norm, model.head_dim, "key norm");
  expect_projection(layer.qkv, model.hidden, model.qkv_columns(), "q/k/v projection");
  expect_projection(layer.attention_out, queries, model.hidden, "attention's output projection");
  expect_projection(layer.gate_up, model.hidden, 2 * model.intermediate, "gate/up projection");
  expect_projection(layer.down, model.intermediate, model.hidden, "down projection");
  expect(layer.window >= 0, "window");
  expect(layer.rope >= -1 && layer.rope < static_cast<int>(model.ropes.size()), "rotary embedding");
}

}  // namespace

int64_t Projection::out() const {
  int64_t out = 0;
  for (const auto& part : parts) out += part->out();
  return out;
}

void Model::check() const {
  expect(vocab > 0 && hidden > 0 && intermediate > 0 && heads > 0 && head_dim > 0, "sizes");
  expect(key_value_heads > 0 && heads % key_value_heads == 0, "number of heads");
  expect(embedding.weight != nullptr, "embedding");
  expect_vector(final_norm, hidden, "final norm");
  expect_projection(head, hidden, vocab, "output head");
  for (const Rope& rope : ropes) {
    expect(2 * static_cast<int64_t>(rope.inverse_frequencies.size()) <= head_dim, "rotary embedding");
  }
  for (const Layer& layer : layers) check_layer(*this, layer);
}

int64_t Model::bytes() const {
  int64_t bytes = bytes_of(head);
  for (const Layer& layer : layers) {
    for (const Projection* projection : {&layer.qkv, &layer.attention_out, &layer.gate_up, &layer.down}) {
      bytes += bytes_of(*projection);
    }
  }
  return bytes;
}

}  // namespace quasar
