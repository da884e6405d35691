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

// X(name, bits, group, largest, steps)
//   bits     of a stored weight
//   group    inputs of an output that share a scale; 0: there are no scales
//   largest  magnitude of a stored integer; 0: weights are floats, and inputs stay as they are
//   steps    that inputs are rounded to at most: 32767 to each side of 0, of one size in a block, or
//            255 from the lowest input of a whole row (or 0) to its highest (or 0)
#define BLOCKGATE_FORMATS(X)               \
  X(float32, 32, 0, 0, 0)                  \
  X(bfloat16, 16, 0, 0, 0)                 \
  X(float16, 16, 0, 0, 0)                  \
  X(int8, 8, WHOLE_BLOCK, 127, 32767)      \
  X(int8a8, 8, WHOLE_BLOCK, 127, 255)      \
  X(int4, 4, 32, 8, 32767)

#define BLOCKGATE_NAME(name, ...) name,
enum class Format { BLOCKGATE_FORMATS(BLOCKGATE_NAME) };
#undef BLOCKGATE_NAME

struct FormatTraits {
  const char* name;
  int64_t bits, group, largest, steps;
};

#define BLOCKGATE_TRAITS(name, bits, group, largest, steps) {#name, bits, group, largest, steps},
inline constexpr FormatTraits FORMATS[] = {BLOCKGATE_FORMATS(BLOCKGATE_TRAITS)};
#undef BLOCKGATE_TRAITS

static constexpr const FormatTraits& traits_of(Format format) { return FORMATS[int(format)]; }

// Whether products read their inputs as whole steps.
static constexpr bool takes_steps(Format format) { return traits_of(format).largest != 0; }

// Most inputs of one exact sum.
static constexpr int64_t summed_inputs(Format format, int64_t depth) {
  return smaller(depth, traits_of(format).group);
}

// Whether a row of inputs has steps of one size throughout.
static constexpr bool steps_by_row(Format format) { return traits_of(format).steps == 255; }

// Steps of the largest input of a block, or of a row: as many as the format has, but never so many
// that a sum could exceed int32. 0: even inputs of one step could.
static constexpr int64_t largest_steps(Format format, int64_t depth) {
  return smaller(traits_of(format).steps,
                 0x7fffffff / (traits_of(format).largest * summed_inputs(format, depth)));
}

// Integers are stored in pairs of inputs: bytes of one output that lie side by side.
static constexpr int64_t bytes_of_pair(Format format) { return 2 * traits_of(format).bits / 8; }

// Sizes in bytes; narrow weights fill whole bytes, 16 outputs side by side.
static constexpr int64_t element_bytes(Format format) { return ceil_div(traits_of(format).bits, 8); }
static constexpr int64_t panel_bytes(Format format, const Grid& g) {
  if (takes_steps(format)) return ceil_div(packed_depth(g), 2) * bytes_of_pair(format) * PANEL;
  return packed_depth(g) * element_bytes(format) * PANEL;
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
