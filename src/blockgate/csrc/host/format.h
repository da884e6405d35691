// How packed formats are written and read back: one row of a block at a time, on the host.
#pragma once

#include "kernels.h"

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <string>

namespace blockgate {

// One output's weights in one block: `length` floats side by side, stored as elements of the format
// PANEL apart (integers: as pairs PANEL apart), with a scale for each group of inputs, `scale_stride`
// apart.
struct RowSize {
  int64_t length, scale_stride;
};

struct HostFormat {
  torch::headeronly::ScalarType dtype;  // of the stored blocks
  // Writes to memory that starts as zeros; elements that stay so must stand for weights of 0.
  void (*encode)(const RowSize& size, const float* weight, void* stored, float* scale);
  void (*decode)(const RowSize& size, const void* stored, const float* scale, float* weight);
};

// Each is defined in host/format_<name>.cpp.
#define BLOCKGATE_DECLARE(name, ...) extern const HostFormat name##_format;
BLOCKGATE_FORMATS(BLOCKGATE_DECLARE)
#undef BLOCKGATE_DECLARE

inline const HostFormat& host_format(Format format) {
#define BLOCKGATE_ADDRESS(name, ...) &name##_format,
  static const HostFormat* const all[] = {BLOCKGATE_FORMATS(BLOCKGATE_ADDRESS)};
#undef BLOCKGATE_ADDRESS
  return *all[int(format)];
}

inline Format format_of(const std::string& name) {
  for (const FormatTraits& format : FORMATS)
    if (name == format.name) return Format(&format - FORMATS);
  std::string known;
  for (const FormatTraits& format : FORMATS)
    known += known.empty() ? format.name : std::string(", ") + format.name;
  STD_TORCH_CHECK(false, "format: expected one of ", known, ", got ", name);
}

}  // namespace blockgate
