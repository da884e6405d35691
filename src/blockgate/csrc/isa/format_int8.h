// int8: the weights of two k lie side by side, so that 32 bytes are the pairs of a panel.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

struct Int8Pair {
  int8_t weights[2];
};

template <>
struct StoredAs<Format::int8> {
  using type = Int8Pair;
};
template <>
struct Arithmetic<float, Int8Pair> : Arithmetic<float, int16_t> {};
template <>
inline constexpr int64_t WEIGHTS<Int8Pair> = 2;

BLOCKGATE_INLINE void load_pairs(const Int8Pair* p, PanelPairs& pairs) {
  widen_pairs(p->weights, pairs);
}

}  // namespace blockgate::BLOCKGATE_ISA
