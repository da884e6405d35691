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
BLOCKGATE_INLINE void load_pairs(const Int4Pair* p, PanelPairs& pairs) {
  PanelLanes lanes;
  widen(&p->bits, lanes);
#pragma GCC unroll 4
  for (int v = 0; v < PAIR_VECTORS; ++v)
    pairs[v] = (Vec<int16_t>)((lanes[v] << 24) | (lanes[v] << 12)) >> 12;
}

}  // namespace blockgate::BLOCKGATE_ISA
