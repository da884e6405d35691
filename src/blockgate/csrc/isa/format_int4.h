// int4: two k share a byte, in two's complement, so that a byte is the pair of one output.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

struct Int4Pair {
  uint8_t bits;
};

template <>
struct StoredAs<Format::int4> {
  using type = Int4Pair;
};
template <>
struct Arithmetic<float, Int4Pair> : Arithmetic<float, int16_t> {};
template <>
inline constexpr int64_t WEIGHTS<Int4Pair> = 2;
template <>
inline constexpr int64_t GROUP<Int4Pair> = traits_of(Format::int4).group;

// Both halves of a byte go to the top of an int16 each, and the shift back down extends the sign. A
// lone last k brings its partner, an unused half, along: the inputs have a 0 there.
BLOCKGATE_INLINE void load_pairs(const Int4Pair* p, int64_t, PanelPairs& pairs) {
  PanelLanes lanes;
  widen(&p->bits, lanes);
#pragma GCC unroll 4
  for (int v = 0; v < PAIR_VECTORS; ++v)
    pairs[v] = (Vec<int16_t>)((lanes[v] << 24) | (lanes[v] << 12)) >> 12;
}

// One panel converted, to be read many times.
inline void expand(const Int4Pair* source, int64_t depth, int16_t* target) {
  for (int64_t k = 0; k < depth; k += 2) {
    PanelPairs pairs;
    load_pairs(source + elements_to<Int4Pair>(k), 0, pairs);
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v)
      store(target + k * PANEL + v * LANES<int16_t>, pairs[v]);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
