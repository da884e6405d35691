// int8: two k are interleaved on load.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

template <>
struct StoredAs<Format::int8> {
  using type = int8_t;
};
template <>
struct Arithmetic<float, int8_t> : Arithmetic<float, int16_t> {};

// The 16 weights at k and those `partner` further on, interleaved and widened.
BLOCKGATE_INLINE void load_pairs(const int8_t* p, int64_t partner, PanelPairs& pairs) {
  interleave(p, p + partner, pairs);
}

// One panel converted, to be read many times.
inline void expand(const int8_t* source, int64_t depth, int16_t* target) {
  for (int64_t k = 0; k < depth; k += 2) {
    PanelPairs pairs;
    load_pairs(source + k * PANEL, k + 1 < depth ? PANEL : 0, pairs);
#pragma GCC unroll 4
    for (int v = 0; v < PAIR_VECTORS; ++v)
      store(target + k * PANEL + v * LANES<int16_t>, pairs[v]);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
