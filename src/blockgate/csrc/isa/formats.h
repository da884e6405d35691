// All packed formats, and the one place where kernels tell them apart.
#pragma once

#include "isa/format_bfloat16.h"
#include "isa/format_float16.h"
#include "isa/format_float32.h"
#include "isa/format_int4.h"
#include "isa/format_int8.h"
#include "isa/format_int8a8.h"

namespace blockgate::BLOCKGATE_ISA {

template <class W>
struct Stored {
  using type = W;
};

// Calls visit(Stored<W>) for the type W in which `format` stores weights that are computed in T.
template <class T, class Visit>
BLOCKGATE_INLINE void visit_format([[maybe_unused]] Format format, const Visit& visit) {
  if constexpr (sizeof(T) != sizeof(float)) {
    // Only training computes in double, on panels of the same.
    visit(Stored<T>{});
  } else {
    switch (format) {
#define BLOCKGATE_VISIT(name, ...) \
  case Format::name: return visit(Stored<StoredAs<Format::name>::type>{});
      BLOCKGATE_FORMATS(BLOCKGATE_VISIT)
#undef BLOCKGATE_VISIT
    }
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
