// float16: IEEE half precision.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

struct Float16 {
  uint16_t bits;
};

template <>
struct StoredAs<Format::float16> {
  using type = Float16;
};

BLOCKGATE_INLINE Vec<float> load_weight(const Float16* p) { return load_halves(&p->bits); }

// One panel converted, to be read many times.
inline void expand(const Float16* source, int64_t depth, float* target) {
  for (int64_t i = 0; i < depth * PANEL; i += LANES<float>)
    store(target + i, load_weight(source + i));
}

}  // namespace blockgate::BLOCKGATE_ISA
