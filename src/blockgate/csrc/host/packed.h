// Products on packed weights: one token streams, several share each block.
#pragma once

#include "host/product.h"
#include "host/tensors.h"

#include <algorithm>

namespace blockgate __attribute__((visibility("hidden"))) {

struct PackedWeight {
  Tensor blocks_tensor, scale_tensor;
  const void* data;
  WeightKind kind;
  const float* scale;
};

// Checks that `blocks` and `scale` are what pack_blocks makes for this grid.
inline PackedWeight packed_weight_of(const Tensor& blocks, const Tensor& scale, const Grid& grid) {
  const ScalarType type = blocks.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Char,
                  "blocks: expected dtype Float, BFloat16 or Char (int8), got ",
                  torch::headeronly::toString(type));
  check_tensor(blocks, "blocks", type, 4);
  const int64_t num_blocks = grid.rows * grid.cols;
  const int64_t expected[4] = {num_blocks, packed_panels(grid), packed_depth(grid), PANEL};
  for (int64_t d = 0; d < 4; ++d) check_size(blocks, "blocks", d, expected[d]);
  STD_TORCH_CHECK(blocks.is_contiguous(), "blocks: expected a contiguous tensor");
  PackedWeight packed{blocks, scale, blocks.const_data_ptr(), WeightKind::packed_float, nullptr};
  if (type == ScalarType::BFloat16) packed.kind = WeightKind::packed_bfloat16;
  if (type == ScalarType::Char) {
    packed.kind = WeightKind::packed_int8;
    STD_TORCH_CHECK(packed_depth(grid) <= MAX_INTEGER_DEPTH, "blocks: expected at most ",
                    MAX_INTEGER_DEPTH, " inputs in an int8 block, got ", packed_depth(grid));
    const Dense<float> scales = dense_of<float>(scale, "scale", 2);
    check_size(scale, "scale", 0, num_blocks);
    check_size(scale, "scale", 1, packed_panels(grid) * PANEL);
    packed.scale_tensor = scales.tensor;
    packed.scale = scales.data;
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

// The only token of a batch; `open` ascending by block.
void run_stream(const StreamArgs& args, const OpenBlock* open, int64_t count);

// Both run any number of tokens, the first with every block open and gate 1.
void run_packed_dense(const PackedWeight& weight, const Grid& grid, const float* x,
                      int64_t x_stride, int64_t tokens, const float* bias, float* y);
void run_packed(const PackedWeight& weight, const Grid& grid, const float* x, int64_t x_stride,
                int64_t tokens, const float* bias, const float* gates, const int64_t* indices,
                int64_t slots, float* y);

}  // namespace blockgate
