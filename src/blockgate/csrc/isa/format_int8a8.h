// int8a8: stored as int8. Its inputs have so few steps that they fit a byte: see quads.h.
#pragma once

#include "isa/format_int8.h"

namespace blockgate::BLOCKGATE_ISA {

template <>
struct StoredAs<Format::int8a8> {
  using type = Int8Pair;
};

}  // namespace blockgate::BLOCKGATE_ISA
