// float32: read as it is.
#pragma once

#include "isa/storage.h"

namespace blockgate::BLOCKGATE_ISA {

template <>
struct StoredAs<Format::float32> {
  using type = float;
};

}  // namespace blockgate::BLOCKGATE_ISA
