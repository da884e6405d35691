// Many tokens, weights and inputs in bytes: four k are multiplied and added at once.
//
// Only where one instruction does that (VNNI); elsewhere the same inputs come as int16, and the same
// exact sums are computed in pairs. Inputs are counted from the lowest of their row, so that they
// have no sign: a sum of products with x - low is one with x and a share of the sum of the weights.
#pragma once

#include "isa/integer_tile.h"

namespace blockgate::BLOCKGATE_ISA {

// Weights of four k of one output.
struct Int8Quad {
  int8_t weights[4];
};

template <>
struct Arithmetic<float, Int8Quad> {
  using Input = uint8_t;
  using Sum = int32_t;
  using Expanded = Int8Quad;
  static constexpr bool IN_PAIRS = false, IN_QUADS = true;
};
template <>
inline constexpr int64_t WEIGHTS<Int8Quad> = 4;

#if defined(BLOCKGATE_VNNI)

inline constexpr bool TAKES_BYTES = true;

// One panel of pairs as quads, and the sums of its weights.
inline void expand_to_quads(const Int8Pair* source, int64_t depth, Int8Quad* target,
                            int32_t* sums) {
  const Vec<uint8_t> ones = broadcast_key<uint8_t>(1);
  Vec<int32_t> sum{};
  for (int64_t k = 0; k < depth; k += 4) {
    // A lone last pair: nothing behind it is read.
    Vec<int8_t> pairs{};
    if (k + 2 < depth) pairs = load(source[elements_to<Int8Pair>(k)].weights);
    else __builtin_memcpy(&pairs, source + elements_to<Int8Pair>(k), PANEL * sizeof(Int8Pair));
    const Vec<int8_t> quads = quads_of_pairs(pairs);
    store(target[elements_to<Int8Quad>(k)].weights, quads);
    sum = add_quads(sum, ones, quads);
  }
  store(sums, sum);
}

template <int ROWS, int PANELS>
BLOCKGATE_INLINE void tile_multiply_quads(Tile<int32_t, ROWS, PANELS>& tile,
                                          const uint8_t* const (&rows)[ROWS],
                                          const int32_t (&zero)[ROWS], const Int8Quad* panels,
                                          int64_t panel_stride, int64_t depth,
                                          const int32_t* weight_sums) {
#pragma GCC unroll 8
  for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m)
      tile.acc[m][p] = broadcast_key(-zero[m]) * load(weight_sums + p * PANEL);
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += 4) {
    Vec<int8_t> weights[PANELS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
      weights[p] = load(panels[p * panel_stride + elements_to<Int8Quad>(k)].weights);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; ++m) {
      int32_t quad;
      __builtin_memcpy(&quad, rows[m] + k, sizeof quad);
      const auto inputs = (Vec<uint8_t>)broadcast_key(quad);
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; ++p)
        tile.acc[m][p] = add_quads(tile.acc[m][p], inputs, weights[p]);
    }
  }
}

#else

inline constexpr bool TAKES_BYTES = false;

#endif

}  // namespace blockgate::BLOCKGATE_ISA
