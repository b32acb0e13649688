// What computes forwards: threads, the code of one instruction set, and scratch memory. It may serve several models.
#pragma once

#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "forward.hpp"
#include "segment.hpp"

namespace quasar {

class Engine {
 public:
  // `instructions` must be those of this CPU.
  Engine(std::shared_ptr<ThreadPool> pool, std::string_view instructions);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int threads() const { return pool_->size(); }

  // Appends each segment's tokens to its cache. Writes the logits of the last n_logits of each, segment by segment, and
  // likewise n_hidden rows of each hidden output. The bits of a row depend on the tokens up to it in its own sequence
  // alone. One forward at a time; others wait.
  // Throws ContextOverflow, NotFinite, std::out_of_range (a token id), std::invalid_argument (see check_segments; a
  // layer that there is not), std::bad_alloc; all caches then have the length that they had.
  void forward(const Model& model, const std::vector<Segment>& segments, float* logits,
               std::vector<HiddenOutput> hidden);

 private:
  const std::shared_ptr<ThreadPool> pool_;
  const RowKernels& kernels_;
  std::mutex busy_;
  Workspace space_;
};

}  // namespace quasar
