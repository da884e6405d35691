// What kernels must know of a stored type: defaults here, the rest in the header of each format.
#pragma once

#include "isa/vec.h"

namespace blockgate::BLOCKGATE_ISA {

// What a product of T inputs with weights stored as W is computed in.
template <class T, class W>
struct Arithmetic {
  using Input = T;
  using Sum = T;
  using Expanded = T;  // what narrow weights are converted to where they are read many times
  static constexpr bool IN_PAIRS = false, IN_QUADS = false;
};

// Integers: int16 weights (as most are expanded to) times int16 inputs, exact sums in int32.
template <>
struct Arithmetic<float, int16_t> {
  using Input = int16_t;
  using Sum = int32_t;
  using Expanded = int16_t;
  static constexpr bool IN_PAIRS = true, IN_QUADS = false;
};

// Weights in one element of W, those of consecutive k.
template <class W>
inline constexpr int64_t WEIGHTS = 1;
// Inputs that share a scale: see BLOCKGATE_FORMATS.
template <class W>
inline constexpr int64_t GROUP = WHOLE_BLOCK;

// Distance in elements from k = 0 to some k, which begins an element.
template <class W>
constexpr int64_t elements_to(int64_t k) {
  return k / WEIGHTS<W> * PANEL;
}
template <class W>
constexpr int64_t panel_elements(int64_t depth) {
  return ceil_div(depth, WEIGHTS<W>) * PANEL;
}
template <class W>
constexpr int64_t block_elements(const Grid& g) {
  return packed_panels(g) * panel_elements<W>(packed_depth(g));
}
// Scales of a block: those of its groups one after the other, each for all padded outputs.
template <class W>
constexpr int64_t block_scales(const Grid& g) {
  return ceil_div(packed_depth(g), GROUP<W>) * packed_panels(g) * PANEL;
}

// The type that a format stores, named by the header of each.
template <Format F>
struct StoredAs;

// Weights as T, converted on load.
BLOCKGATE_INLINE Vec<float> load_weight(const float* p) { return load(p); }
BLOCKGATE_INLINE Vec<double> load_weight(const double* p) { return load(p); }

// Expanded weights in pairs: see PanelPairs.
BLOCKGATE_INLINE void load_pairs(const int16_t* p, PanelPairs& pairs) {
#pragma GCC unroll 4
  for (int v = 0; v < PAIR_VECTORS; ++v) pairs[v] = load(p + v * LANES<int16_t>);
}

}  // namespace blockgate::BLOCKGATE_ISA
