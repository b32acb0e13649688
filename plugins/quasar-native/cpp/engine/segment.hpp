// What a forward computes: new positions of one or several sequences, packed on one axis of rows.
#pragma once

#include <cstdint>
#include <vector>

#include "cache.hpp"
#include "model.hpp"

namespace quasar {

// The next positions of one sequence: its cache, the tokens that are appended to it, and of how many of the last of
// them logits and hidden states are wanted.
struct Segment {
  Cache* cache;
  const int32_t* token_ids;
  int64_t n, n_logits, n_hidden;
};

// Rows of a pass that follow each other in one sequence.
struct Stretch {
  Cache* cache;
  const int32_t* token_ids;
  int64_t segment;    // its number
  int64_t first, n;   // rows first..first+n-1 of the pass
  int64_t at;         // are positions at..at+n-1 of the sequence
  int64_t n_logits, n_hidden;  // of its last rows

  int64_t position(int64_t row) const { return at + row - first; }
};

// Some rows that go through all layers together. How many does not matter to their bits; it bounds the memory.
struct Pass {
  std::vector<Stretch> stretches;
  int64_t rows = 0, n_logits = 0, n_hidden = 0;
};

constexpr int64_t kPassRows = 128;

// All rows of the segments, in their order, in passes of kPassRows at most.
std::vector<Pass> passes_of(const std::vector<Segment>& segments);

// Throws ContextOverflow, std::out_of_range (a token id) and std::invalid_argument (a cache of another model or one that
// two segments have, more rows wanted than there are).
void check_segments(const Model& model, const std::vector<Segment>& segments);

}  // namespace quasar
