// Memory for the inputs of products with integer weights, as steps.
#pragma once

#include "host/buffer.h"
#include "host/dispatch.h"

namespace blockgate {

// Owns what the view shows.
struct QuantisedCopy {
  QuantisedRows view{};
  Buffer<int16_t> steps;
  Buffer<float> size;
  Buffer<uint8_t> bytes;
  Buffer<int32_t> zero;
};

// Whether several tokens are better given as bytes. Kernels for them expand every block that they
// read, which pays from a few tokens on.
inline bool in_bytes(const Grid& grid, Format format, int64_t tokens) {
  return steps_by_row(format) && kernels().takes_bytes && packed_depth(grid) >= 4 && tokens >= 4;
}

// Room for the inputs of some tokens, as int16 or as bytes.
inline QuantisedCopy quantised_room(const Grid& grid, int64_t tokens, bool bytes = false) {
  // The blocks begin at odd distances: see BlockRows.
  const int64_t unit = bytes ? 4 : 2, stride = ceil_div(packed_depth(grid), unit) * unit;
  const int64_t block_stride = tokens * stride + 32 * unit / 2;
  QuantisedCopy room;
  room.size = Buffer<float>(grid.cols * tokens);
  room.view = {.steps = {}, .size = room.size.get(), .tokens = tokens};
  if (bytes) {
    room.bytes = Buffer<uint8_t>(grid.cols * block_stride);
    room.zero = Buffer<int32_t>(tokens);
    room.view.bytes = {room.bytes.get(), block_stride, stride};
    room.view.zero = room.zero.get();
  } else {
    room.steps = Buffer<int16_t>(grid.cols * block_stride);
    room.view.steps = {room.steps.get(), block_stride, stride};
  }
  return room;
}

// One token of x where all of a row has steps of one size.
inline void quantise_row(const Grid& grid, Format format, const float* x, int64_t token,
                         const QuantisedCopy& to) {
  const KernelTable& kernel = kernels();
  const QuantisedRows& view = to.view;
  const RowSteps row =
      kernel.measure_row(x, grid.in, largest_steps(format, packed_depth(grid)));
  if (view.zero) to.zero[token] = -row.low;
  for (int64_t col = 0; col < grid.cols; ++col) {
    const float* part = x + col * grid.block_in;
    const int64_t depth = inputs_of_col(grid, col);
    to.size[col * view.tokens + token] = row.size;
    if (view.zero)
      kernel.quantise_to_bytes(row, part, depth, to.bytes.get() + col * view.bytes.block_stride +
                                                     token * view.bytes.stride);
    else
      kernel.quantise_by(row, part, depth, to.steps.get() + col * view.steps.block_stride +
                                               token * view.steps.stride);
  }
}

// Tokens [begin, end) of x, whose rows are x_stride apart.
inline void quantise_tokens(const Grid& grid, Format format, const float* x, int64_t x_stride,
                            int64_t begin, int64_t end, const QuantisedCopy& to) {
  if (steps_by_row(format)) {
    for (int64_t t = begin; t < end; ++t) quantise_row(grid, format, x + t * x_stride, t, to);
    return;
  }
  const BlockRows<int16_t>& steps = to.view.steps;
  for (int64_t col = 0; col < grid.cols; ++col) {
    const int64_t depth = inputs_of_col(grid, col), largest = largest_steps(format, depth);
    for (int64_t t = begin; t < end; ++t)
      to.size[col * to.view.tokens + t] =
          kernels().quantise(x + t * x_stride + col * grid.block_in, depth, largest,
                             to.steps.get() + col * steps.block_stride + t * steps.stride);
  }
}

}  // namespace blockgate
