// The engine for Python: caches, segments of sequences, and the forward over them.
#include "engine/engine.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "arrays.hpp"
#include "engine/errors.hpp"
#include "products/dispatch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace quasar {
namespace {

using TokenIds = Array<const int32_t, 1>;

// A segment and what it refers to.
struct BoundSegment {
  std::shared_ptr<Cache> cache;
  TokenIds token_ids;
  int64_t n_logits, n_hidden;

  Segment view() const {
    return {cache.get(), token_ids.data(), static_cast<int64_t>(token_ids.shape(0)), n_logits, n_hidden};
  }
};

void check_rows(const Matrix<float>& array, int64_t rows, int64_t columns, const char* what) {
  const bool fits = static_cast<int64_t>(array.shape(0)) == rows && static_cast<int64_t>(array.shape(1)) == columns;
  require(fits, std::string(what) + " of shape " + shape_of(array) + ", expected [" + std::to_string(rows) + ", " +
                    std::to_string(columns) + "]");
}

void forward(Engine& engine, const Model& model, const std::vector<std::shared_ptr<BoundSegment>>& segments,
             const Matrix<float>& logits, const std::vector<std::pair<int64_t, Matrix<float>>>& hidden) {
  std::vector<Segment> views;
  int64_t n_logits = 0, n_hidden = 0;
  for (const auto& segment : segments) {
    views.push_back(segment->view());
    n_logits += segment->n_logits;
    n_hidden += segment->n_hidden;
  }
  check_rows(logits, n_logits, model.vocab, "logits");
  std::vector<HiddenOutput> outputs;
  for (const auto& [index, rows] : hidden) {
    check_rows(rows, n_hidden, model.hidden, "hidden states");
    outputs.push_back({index, rows.data()});
  }
  float* const to = logits.data();
  nb::gil_scoped_release release;
  engine.forward(model, views, to, std::move(outputs));
}

std::vector<std::string> cache_formats() {
  std::vector<std::string> names;
  for (const CacheFormatInfo& info : kCacheFormats) names.emplace_back(info.name);
  return names;
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
  module.def("cache_formats", &cache_formats);
  nb::class_<Cache>(module, "Cache")
      .def("__init__",
           [](Cache* self, const Model& model, const std::string& format) {
             new (self) Cache(model, cache_format_named(format));
           },
           "model"_a, "format"_a)
      .def_prop_ro("length", &Cache::length)
      .def("truncate", &Cache::truncate, "length"_a);
  nb::class_<BoundSegment>(module, "Segment")
      .def("__init__",
           [](BoundSegment* self, std::shared_ptr<Cache> cache, const TokenIds& token_ids, int64_t n_logits,
              int64_t n_hidden) { new (self) BoundSegment{std::move(cache), token_ids, n_logits, n_hidden}; },
           "cache"_a, "token_ids"_a.noconvert(), "n_logits"_a = 0, "n_hidden"_a = 0);
  nb::class_<Engine>(module, "Engine")
      .def("__init__",
           [](Engine* self, std::shared_ptr<ThreadPool> pool, const std::string& instructions) {
             new (self) Engine(std::move(pool), kernels_named(instructions).name);
           },
           "pool"_a, "instructions"_a)
      .def_prop_ro("threads", &Engine::threads)
      .def("forward", &forward, "model"_a, "segments"_a, "logits"_a.noconvert(), "hidden"_a.noconvert() = nb::list());
  nb::register_exception_translator(translate);
}

}  // namespace quasar
