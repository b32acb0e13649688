// One sequence: its cache, and the forward that appends to it.
#pragma once

#include <cstdint>
#include <memory>

#include "cache.hpp"
#include "model.hpp"

namespace quasar {

class Session {
 public:
  Session(std::shared_ptr<const Model> model, CacheType cache);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  int64_t length() const { return length_; }
  const Model& model() const { return *model_; }

  // Forgets all positions from `length` on.
  void truncate(int64_t length);

  // Appends n tokens and computes the logits [n_logits, vocab] of the last of them, and where `hidden` is given their
  // last hidden states [n_logits, hidden]. Bits of a row depend on the tokens up to it alone.
  // Throws ContextOverflow, NotFinite, std::out_of_range (a token id), std::bad_alloc; the length is then as before.
  void forward(const int32_t* token_ids, int64_t n, int64_t n_logits, float* logits, float* hidden);

 private:
  void embed(const int32_t* token_ids, int64_t rows);
  void turn_tables(int64_t rows, int64_t at);
  void run_layers(int64_t rows, int64_t at);
  void finish(int64_t rows, int64_t wanted, int64_t at, float* logits, float* hidden);

  std::shared_ptr<const Model> model_;
  Cache cache_;
  int64_t length_ = 0;
};

}  // namespace quasar
