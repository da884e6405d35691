// bfloat16: the upper half of a float32's bits.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

struct BFloat16 {
  uint16_t bits;
};

template <>
struct StoredAs<Format::bfloat16> {
  using type = BFloat16;
};

BLOCKGATE_INLINE Vec<float> load_weight(const BFloat16* p) {
  return (Vec<float>)(widen(&p->bits) << 16);
}

// One panel converted, to be read many times.
inline void expand(const BFloat16* source, int64_t depth, float* target) {
  for (int64_t i = 0; i < depth * PANEL; i += LANES<float>)
    store(target + i, load_weight(source + i));
}

}  // namespace blockgate::BLOCKGATE_ISA
