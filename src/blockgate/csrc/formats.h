// The packed formats, one line each, and what both sides of the contract derive from that line.
//
// A format is this line, isa/format_<name>.h (how kernels read it, included by isa/formats.h),
// host/format_<name>.cpp (how it is written and read back) and formats/<name>.py (what all of them
// must equal).
#pragma once

#include "grid.h"

namespace blockgate {

// For `group`: one scale for all inputs of an output in a block.
inline constexpr int64_t WHOLE_BLOCK = int64_t(1) << 40;

// X(name, bits, group, largest)
//   bits     of a stored weight
//   group    inputs of an output that share a scale; 0: there are no scales
//   largest  magnitude of a stored integer; 0: weights are floats, and inputs stay as they are
#define BLOCKGATE_FORMATS(X)        \
  X(float32, 32, 0, 0)              \
  X(bfloat16, 16, 0, 0)             \
  X(int8, 8, WHOLE_BLOCK, 127)      \
  X(int4, 4, 32, 8)

#define BLOCKGATE_NAME(name, ...) name,
enum class Format { BLOCKGATE_FORMATS(BLOCKGATE_NAME) };
#undef BLOCKGATE_NAME

struct FormatTraits {
  const char* name;
  int64_t bits, group, largest;
};

#define BLOCKGATE_TRAITS(name, bits, group, largest) {#name, bits, group, largest},
inline constexpr FormatTraits FORMATS[] = {BLOCKGATE_FORMATS(BLOCKGATE_TRAITS)};
#undef BLOCKGATE_TRAITS

static constexpr const FormatTraits& traits_of(Format format) { return FORMATS[int(format)]; }

// Whether products read their inputs as int16 steps.
static constexpr bool takes_steps(Format format) { return traits_of(format).largest != 0; }

// Most inputs of one exact sum.
static constexpr int64_t summed_inputs(Format format, int64_t depth) {
  return smaller(depth, traits_of(format).group);
}

// Steps that stand for the largest input of a block: as many as int16 holds, but never so many that
// a sum could exceed int32. 0: even inputs of one step could.
static constexpr int64_t largest_steps(Format format, int64_t depth) {
  return smaller(0x7fff, 0x7fffffff / (traits_of(format).largest * summed_inputs(format, depth)));
}

// Sizes in bytes; narrow weights fill whole bytes, 16 outputs side by side.
static constexpr int64_t element_bytes(Format format) { return ceil_div(traits_of(format).bits, 8); }
static constexpr int64_t panel_bytes(Format format, const Grid& g) {
  return ceil_div(packed_depth(g) * traits_of(format).bits, 8) * PANEL;
}
static constexpr int64_t block_bytes(Format format, const Grid& g) {
  return packed_panels(g) * panel_bytes(format, g);
}

// Groups of inputs with scales of their own; a block's scales lie as [group][padded output].
static constexpr int64_t scale_groups(Format format, const Grid& g) {
  const int64_t group = traits_of(format).group;
  return group == 0 ? 0 : ceil_div(packed_depth(g), group);
}

// Packed blocks as kernels see them. In training `float32` stands for panels of the type that is
// computed in, float or double.
struct PackedView {
  const void* blocks;
  const float* scale;
  Format format;
};

}  // namespace blockgate
