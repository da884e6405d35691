// Packing, unpacking, and the products on packed weights.
#include "bind/groups.h"
#include "host/packed.h"
#include "host/product.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>
#include <tuple>

namespace blockgate {
namespace {

// Round to nearest, ties to even; NaN stays NaN.
uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(uint16_t stored) {
  const uint32_t bits = uint32_t(stored) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One output row of one block: reading and writing both go through this, so they can't disagree.
struct BlockRow {
  int64_t weight_offset;  // of the row's first value in the (out, in) weight
  int64_t packed_offset;  // of the row's first value in the blocks; the next k is PANEL further
  int64_t scale_offset;
  int64_t length;
};

template <class Visit>
void visit_block_rows(const Grid& grid, const Visit& visit) {
  const int64_t padded = packed_panels(grid) * PANEL;
  run_tasks(grid.rows * grid.cols, threads_for(grid.out * grid.in), [&](int64_t block) {
    const int64_t row = block / grid.cols, col = block % grid.cols;
    for (int64_t o = 0; o < outputs_of_row(grid, row); ++o)
      visit(BlockRow{(row * grid.block_out + o) * grid.in + col * grid.block_in,
                     block * packed_block_size(grid) + o / PANEL * packed_depth(grid) * PANEL +
                         o % PANEL,
                     block * padded + o, inputs_of_col(grid, col)});
  });
}

// scale = max|w| / 127; stored = round to nearest even of w / scale.
void quantise_row(const float* weight, int64_t length, int8_t* stored, float* scale) {
  float largest = 0;
  for (int64_t k = 0; k < length; ++k) largest = std::fmax(largest, std::fabs(weight[k]));
  *scale = largest / 127;
  if (*scale == 0) return;
  for (int64_t k = 0; k < length; ++k) {
    const float steps = std::nearbyint(weight[k] / *scale);
    stored[k * PANEL] = int8_t(std::fmin(127.0f, std::fmax(-127.0f, steps)));
  }
}

std::tuple<Tensor, Tensor> pack_blocks(const Tensor& weight, Integers block, ScalarType dtype) {
  const Dense<float> w = dense_of<float>(weight, "weight", 2);
  const BlockSize size = block_of(block);
  const Grid grid = make_grid(weight.size(0), weight.size(1), size.out, size.in);
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 ||
                      dtype == ScalarType::Char,
                  "dtype: expected Float, BFloat16 or Char (int8), got ",
                  torch::headeronly::toString(dtype));
  const int64_t num_blocks = grid.rows * grid.cols;
  const int64_t padded = packed_panels(grid) * PANEL;
  const Tensor blocks =
      empty_tensor({num_blocks, packed_panels(grid), packed_depth(grid), PANEL}, dtype);
  std::memset(blocks.mutable_data_ptr(), 0, blocks.numel() * blocks.element_size());
  use_huge_pages(blocks);
  if (dtype == ScalarType::Char) {
    const Tensor scale = empty_tensor({num_blocks, padded}, ScalarType::Float);
    float* scales = data_of<float>(scale);
    std::memset(scales, 0, num_blocks * padded * sizeof(float));
    int8_t* target = data_of<int8_t>(blocks);
    visit_block_rows(grid, [&](const BlockRow& r) {
      quantise_row(w.data + r.weight_offset, r.length, target + r.packed_offset,
                   scales + r.scale_offset);
    });
    return {blocks, scale};
  }
  if (dtype == ScalarType::BFloat16) {
    uint16_t* target = data_of<uint16_t>(blocks);
    visit_block_rows(grid, [&](const BlockRow& r) {
      for (int64_t k = 0; k < r.length; ++k)
        target[r.packed_offset + k * PANEL] = to_bfloat16(w.data[r.weight_offset + k]);
    });
  } else {
    float* target = data_of<float>(blocks);
    visit_block_rows(grid, [&](const BlockRow& r) {
      for (int64_t k = 0; k < r.length; ++k)
        target[r.packed_offset + k * PANEL] = w.data[r.weight_offset + k];
    });
  }
  return {blocks, empty_tensor({int64_t(0)}, ScalarType::Float)};
}

Tensor unpack_blocks(const Tensor& blocks, const Tensor& scale, Integers sizes) {
  const Grid grid = grid_of(sizes);
  const PackedWeight packed = packed_weight_of(blocks, scale, grid);
  const Tensor weight = empty_tensor({grid.out, grid.in}, ScalarType::Float);
  float* target = data_of<float>(weight);
  visit_block_rows(grid, [&](const BlockRow& r) {
    float* to = target + r.weight_offset;
    for (int64_t k = 0; k < r.length; ++k) {
      const int64_t from = r.packed_offset + k * PANEL;
      switch (packed.kind) {
        case WeightKind::packed_bfloat16:
          to[k] = from_bfloat16(static_cast<const uint16_t*>(packed.data)[from]);
          break;
        case WeightKind::packed_int8:
          to[k] = static_cast<const int8_t*>(packed.data)[from] * packed.scale[r.scale_offset];
          break;
        default:
          to[k] = static_cast<const float*>(packed.data)[from];
      }
    }
  });
  return weight;
}

Tensor packed_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                     const std::optional<Tensor>& bias, const Tensor& gates, const Tensor& indices,
                     Integers sizes) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid grid = grid_of(sizes);
  check_size(x, "x", 1, grid.in);
  const PackedWeight packed = packed_weight_of(blocks, scale, grid);
  const Dense<float> b = bias_of<float>(bias, "bias", grid.out, blocks);
  const Gates<float> gate = gates_of<float>(gates, indices, rows.count);
  const Tensor y = empty_tensor({rows.count, grid.out}, ScalarType::Float);
  run_packed(packed, grid, rows.data, rows.stride, rows.count, b.data, gate.gates.data,
             gate.indices.data, gate.slots, data_of<float>(y));
  return y;
}

Tensor dense_packed_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                           const std::optional<Tensor>& bias, Integers sizes) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid grid = grid_of(sizes);
  check_size(x, "x", 1, grid.in);
  const PackedWeight packed = packed_weight_of(blocks, scale, grid);
  const Dense<float> b = bias_of<float>(bias, "bias", grid.out, blocks);
  const Tensor y = empty_tensor({rows.count, grid.out}, ScalarType::Float);
  run_packed_dense(packed, grid, rows.data, rows.stride, rows.count, b.data, data_of<float>(y));
  return y;
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("pack_blocks", TORCH_BOX(&blockgate::pack_blocks));
  m.impl("unpack_blocks", TORCH_BOX(&blockgate::unpack_blocks));
  m.impl("packed_linear", TORCH_BOX(&blockgate::packed_linear));
  m.impl("dense_packed_linear", TORCH_BOX(&blockgate::dense_packed_linear));
}
