// Packing, unpacking, and the products on packed weights.
#include "bind/groups.h"
#include "host/packed.h"
#include "host/product.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <cstring>
#include <string>
#include <tuple>

namespace blockgate {
namespace {

// One output row of one block: reading and writing both go through this, so they can't disagree.
struct BlockRow {
  int64_t weight_offset;  // of the row's first value in the (out, in) weight
  int64_t byte_offset;    // of the row's first element in the blocks
  int64_t scale_offset;  // 0 where there are no scales
  RowSize size;
};

template <class Visit>
void visit_block_rows(Format format, const Grid& grid, const Visit& visit) {
  const int64_t padded = packed_panels(grid) * PANEL, groups = scale_groups(format, grid);
  run_tasks(grid.rows * grid.cols, threads_for(grid.out * grid.in), [&](int64_t block) {
    const int64_t row = block / grid.cols, col = block % grid.cols;
    for (int64_t o = 0; o < outputs_of_row(grid, row); ++o)
      visit(BlockRow{(row * grid.block_out + o) * grid.in + col * grid.block_in,
                     block * block_bytes(format, grid) + o / PANEL * panel_bytes(format, grid) +
                         o % PANEL * (takes_steps(format) ? bytes_of_pair(format) : element_bytes(format)),
                     groups > 0 ? block * groups * padded + o : 0,
                     {inputs_of_col(grid, col), padded}});
  });
}

Tensor zeros(const Tensor& made) {
  // Nothing to clear may mean no memory at all.
  if (made.numel() > 0)
    std::memset(made.mutable_data_ptr(), 0, made.numel() * made.element_size());
  return made;
}

Tensor empty_scale(Format format, const PackedShape& shape) {
  if (shape.groups == 0) return empty_tensor({int64_t(0)}, ScalarType::Float);
  if (traits_of(format).group == WHOLE_BLOCK)
    return empty_tensor({shape.blocks[0], shape.padded}, ScalarType::Float);
  return empty_tensor({shape.blocks[0], shape.groups, shape.padded}, ScalarType::Float);
}

std::tuple<Tensor, Tensor> pack_blocks(const Tensor& weight, Integers block,
                                       const std::string& format_name) {
  const Dense<float> w = dense_of<float>(weight, "weight", 2);
  const BlockSize size = block_of(block);
  const Grid grid = make_grid(weight.size(0), weight.size(1), size.out, size.in);
  const Format format = format_of(format_name);
  const PackedShape shape = packed_shape(format, grid);
  const Tensor blocks = zeros(empty_tensor(shape.blocks, host_format(format).dtype));
  const Tensor scale = zeros(empty_scale(format, shape));
  use_huge_pages(blocks);
  visit_block_rows(format, grid, [&](const BlockRow& r) {
    host_format(format).encode(r.size, w.data + r.weight_offset,
                               data_of<std::byte>(blocks) + r.byte_offset,
                               data_of<float>(scale) + r.scale_offset);
  });
  return {blocks, scale};
}

Tensor unpack_blocks(const Tensor& blocks, const Tensor& scale, Integers sizes,
                     const std::string& format_name) {
  const Grid grid = grid_of(sizes);
  const Format format = format_of(format_name);
  const PackedView packed = packed_weight_of(blocks, scale, grid, format).view();
  const Tensor weight = empty_tensor({grid.out, grid.in}, ScalarType::Float);
  visit_block_rows(format, grid, [&](const BlockRow& r) {
    host_format(format).decode(
        r.size, static_cast<const std::byte*>(packed.blocks) + r.byte_offset,
        packed.scale + r.scale_offset, data_of<float>(weight) + r.weight_offset);
  });
  return weight;
}

Tensor packed_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                     const std::optional<Tensor>& bias, const Tensor& gates, const Tensor& indices,
                     Integers sizes, const std::string& format) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid grid = grid_of(sizes);
  check_size(x, "x", 1, grid.in);
  const PackedWeight packed = packed_weight_of(blocks, scale, grid, format_of(format));
  const Dense<float> b = bias_of<float>(bias, "bias", grid.out, blocks);
  const Gates<float> gate = gates_of<float>(gates, indices, rows.count);
  const Tensor y = empty_tensor({rows.count, grid.out}, ScalarType::Float);
  run_packed(packed, grid, rows.data, rows.stride, rows.count, b.data, gate.gates.data,
             gate.indices.data, gate.slots, data_of<float>(y));
  return y;
}

Tensor dense_packed_linear(const Tensor& x, const Tensor& blocks, const Tensor& scale,
                           const std::optional<Tensor>& bias, Integers sizes,
                           const std::string& format) {
  const Rows<float> rows = rows_of<float>(x, "x");
  const Grid grid = grid_of(sizes);
  check_size(x, "x", 1, grid.in);
  const PackedWeight packed = packed_weight_of(blocks, scale, grid, format_of(format));
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
