// Products on packed weights: one token streams, several share each block.
#pragma once

#include "host/format.h"
#include "host/product.h"
#include "host/tensors.h"

#include <algorithm>

namespace blockgate __attribute__((visibility("hidden"))) {

struct PackedWeight {
  Tensor blocks_tensor, scale_tensor;
  int64_t blocks_size, scale_size;
  Format format;

  // Taken anew for every call: the memory of a tensor may move, as it does into shared memory.
  PackedView view() const {
    check_numel(blocks_tensor, "blocks", blocks_size);
    if (scale_size == 0) return {blocks_tensor.const_data_ptr(), nullptr, format};
    check_numel(scale_tensor, "scale", scale_size);
    return {blocks_tensor.const_data_ptr(), static_cast<const float*>(scale_tensor.const_data_ptr()),
            format};
  }
};

// Sizes of the tensors that a weight is packed to. Scales of whole blocks have no dimension of groups.
struct PackedShape {
  int64_t blocks[4];
  int64_t groups, padded;  // of the scales
};

inline PackedShape packed_shape(Format format, const Grid& grid) {
  const int64_t line = PANEL * (takes_steps(format) ? bytes_of_pair(format) : 1);
  return {{grid.rows * grid.cols, packed_panels(grid),
           panel_bytes(format, grid) / (line * element_bytes(format)), line},
          scale_groups(format, grid),
          packed_panels(grid) * PANEL};
}

// Checks that `blocks` and `scale` are what pack_blocks makes for this grid.
inline PackedWeight packed_weight_of(const Tensor& blocks, const Tensor& scale, const Grid& grid,
                                     Format format) {
  const PackedShape shape = packed_shape(format, grid);
  check_tensor(blocks, "blocks", host_format(format).dtype, 4);
  for (int64_t d = 0; d < 4; ++d) check_size(blocks, "blocks", d, shape.blocks[d]);
  STD_TORCH_CHECK(blocks.is_contiguous(), "blocks: expected a contiguous tensor");
  PackedWeight packed{blocks, scale, blocks.numel(), 0, format};
  const FormatTraits& traits = traits_of(format);
  if (takes_steps(format)) {
    const int64_t most = 0x7fffffff / traits.largest;
    STD_TORCH_CHECK(summed_inputs(format, packed_depth(grid)) <= most, "blocks: expected at most ",
                    most, " inputs in an ", traits.name, " block, got ", packed_depth(grid));
  }
  if (shape.groups > 0) {
    const bool grouped = traits.group != WHOLE_BLOCK;
    const Dense<float> scales = dense_of<float>(scale, "scale", grouped ? 3 : 2);
    check_size(scale, "scale", 0, shape.blocks[0]);
    if (grouped) check_size(scale, "scale", 1, shape.groups);
    check_size(scale, "scale", grouped ? 2 : 1, shape.padded);
    packed.scale_tensor = scales.tensor;
    packed.scale_size = scales.tensor.numel();
  }
  return packed;
}

// Gathers blocks that will be read many times in huge pages, whatever memory they came to lie in:
// prefetchers stop at the end of a page, and translating many small ones slows every read.
inline void use_huge_pages([[maybe_unused]] const Tensor& blocks) {
#if defined(__linux__)
  constexpr uintptr_t HUGE_PAGE = uintptr_t(2) << 20;
  constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, of Linux 6.1; older headers don't name it
  const auto begin = reinterpret_cast<uintptr_t>(blocks.const_data_ptr());
  const uintptr_t end = begin + blocks.numel() * blocks.element_size();
  if (end - begin < 2 * HUGE_PAGE) return;
  // With the whole of the first and last page: nobody's memory changes but in the size of its page.
  // Only a hint: where it is refused, nothing is lost.
  const uintptr_t first = begin / HUGE_PAGE * HUGE_PAGE;
  madvise(reinterpret_cast<void*>(first), (end - first + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE,
          COLLAPSE);
#endif
}

// How a batch is run: its tokens share each block while it is at hand, or one comes after the other.
// A single token always streams. Both give the same bits.
enum class Regime { grouped, streamed };

// Both run any number of tokens, the first with every block open and gate 1.
void run_packed_dense(const PackedWeight& weight, const Grid& grid, const float* x,
                      int64_t x_stride, int64_t tokens, const float* bias, float* y,
                      Regime regime = Regime::grouped);
void run_packed(const PackedWeight& weight, const Grid& grid, const float* x, int64_t x_stride,
                int64_t tokens, const float* bias, const float* gates, const int64_t* indices,
                int64_t slots, float* y, Regime regime = Regime::grouped);
// One token, with every block open: outputs of the rows of blocks [row_begin, row_end) only, the same bits.
void run_packed_rows(const PackedWeight& weight, const Grid& grid, const float* x, const float* bias, float* y,
                     int64_t row_begin, int64_t row_end);

}  // namespace blockgate
