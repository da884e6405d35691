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
};

// Room for the inputs of some tokens.
inline QuantisedCopy quantised_room(const Grid& grid, int64_t tokens) {
  const int64_t stride = packed_depth(grid) + packed_depth(grid) % 2;
  // The blocks begin at odd distances: see BlockRows.
  const int64_t block_stride = tokens * stride + 32;
  QuantisedCopy room{{}, Buffer<int16_t>(grid.cols * block_stride),
                     Buffer<float>(grid.cols * tokens)};
  room.view = {{room.steps.get(), block_stride, stride}, room.size.get(), tokens};
  return room;
}

// Tokens [begin, end) of x, whose rows are x_stride apart.
inline void quantise_tokens(const Grid& grid, Format format, const float* x, int64_t x_stride,
                            int64_t begin, int64_t end, const QuantisedCopy& to) {
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
