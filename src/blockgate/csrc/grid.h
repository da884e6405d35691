// The block grid and the sizes that follow from it; part of the contract (see kernels.h).
#pragma once

#include <cstdint>

namespace blockgate {

// Outputs per panel of the packed layout: block -> panels -> k, or a pair of k -> 16 outputs.
inline constexpr int64_t PANEL = 16;

// For a from 0 and b from 1, however large.
static constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// The cut of a weight (out, in) into rows x cols blocks; the last row and column may be ragged.
struct Grid {
  int64_t out, in, block_out, block_in, rows, cols;
};

static constexpr int64_t outputs_of_row(const Grid& g, int64_t row) {
  return smaller(g.block_out, g.out - row * g.block_out);
}
static constexpr int64_t inputs_of_col(const Grid& g, int64_t col) {
  return smaller(g.block_in, g.in - col * g.block_in);
}
// Sizes of a packed block: the same for all blocks of a grid.
static constexpr int64_t packed_depth(const Grid& g) { return smaller(g.block_in, g.in); }
static constexpr int64_t packed_panels(const Grid& g) {
  return ceil_div(smaller(g.block_out, g.out), PANEL);
}
static constexpr int64_t packed_block_size(const Grid& g) {
  return packed_panels(g) * packed_depth(g) * PANEL;
}

}  // namespace blockgate
