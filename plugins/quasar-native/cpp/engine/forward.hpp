// One pass of rows through a model.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "projection.hpp"
#include "segment.hpp"
#include "workspace.hpp"

namespace quasar {

// Where the hidden states behind layer `index` go: 0 is the embedding, n_layers the states behind the last norm.
struct HiddenOutput {
  int64_t index;
  float* rows;  // [n_hidden of all segments, hidden]
};

// Rows see no other rows but by attention, which reads the cache of their own sequence; so it does not matter to the
// bits of a row which others there are.
class Forward {
 public:
  Forward(const Model& model, const Pass& pass, Workspace& space, ThreadPool& pool, const RowKernels& kernels)
      : model_(model), pass_(pass), space_(space), pool_(pool), kernels_(kernels) {}

  // Appends to the caches; writes pass.n_logits rows of logits and pass.n_hidden rows of each hidden output.
  void run(float* logits, const std::vector<HiddenOutput>& hidden);

 private:
  void embed();
  void make_angles();
  void run_layer(int64_t index);
  void norm(const float* inputs, const Vector& weight, float* outputs, int64_t row);
  void add_and_norm(const Vector& own_norm, const Vector& next_norm);
  const Vector& norm_before(int64_t layer) const;
  void record(int64_t index, const float* states, const std::vector<HiddenOutput>& hidden);
  void finish(float* logits);
  void gather_wanted_rows();
  void refuse(int64_t bad) const;

  void attend(int64_t index);
  void remember(const Layer& layer, int64_t index, const Stretch& stretch, int64_t row);
  void prepare_head(const Layer& layer, int64_t row, float* head, const Vector& norm);
  void attend_rows(const Layer& layer, int64_t index, const Stretch& stretch, int64_t job, float* scratch);
  const Stretch& stretch_of(int64_t row) const;

  const Model& model_;
  const Pass& pass_;
  Workspace& space_;
  ThreadPool& pool_;
  const RowKernels& kernels_;
};

}  // namespace quasar
