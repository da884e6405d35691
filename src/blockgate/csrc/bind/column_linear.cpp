// column_linear: norm gates and the product with the columns that they open, in one call.
#include "bind/groups.h"
#include "host/bad_rows.h"
#include "host/buffer.h"
#include "host/dispatch.h"
#include "host/format.h"
#include "host/select.h"
#include "host/tensors.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstring>

namespace blockgate {
namespace {

// As `blockgate.formats.columns` stores them.
int64_t outputs_per_scale(Format format) {
  return format == Format::int8 ? 128 : format == Format::int4 ? 32 : 0;
}

ScalarType column_type(Format format) {
  switch (format) {
    case Format::bfloat16: return ScalarType::BFloat16;
    case Format::float16: return ScalarType::Half;
    case Format::int8: return ScalarType::Char;
    case Format::int4: return ScalarType::Byte;
    default: return ScalarType::Float;
  }
}

// Which columns a token opens in every row of blocks, ascending.
void open_columns(const TopK& spec, const float* x, const float* norms, int64_t inputs,
                  int64_t* open) {
  const Buffer<float> scores(spec.scores), values(spec.groups * spec.open_blocks);
  const Buffer<float> scratch(top_k_scratch(spec));
  for (int64_t i = 0; i < spec.groups; ++i)
    for (int64_t j = 0; j < inputs; ++j)
      scores[i * inputs + j] = std::fabs(x[j]) * norms[i * inputs + j];
  // Which ones, not how much: their values are not asked for.
  typed_kernels<float>().select(spec, 0, spec.groups, scores.get(), values.get(), open, scratch.get());
  for (int64_t i = 1; i < spec.groups; ++i)
    for (int64_t k = 0; k < spec.open_blocks; ++k) open[i * spec.open_blocks + k] -= i * inputs;
}

Tensor column_linear(const Tensor& x, const Tensor& columns, const Tensor& scale,
                     const std::optional<Tensor>& bias, const Tensor& norms, Integers sizes,
                     int64_t open_blocks, const std::string& name) {
  STD_TORCH_CHECK(sizes.size() == 4 && sizes[3] == 1,
                  "grid: expected (out, in, block_out, 1), blocks of one column");
  const Grid grid = make_grid(sizes[0], sizes[1], sizes[2], sizes[3]);
  const Format format = format_of(name);
  STD_TORCH_CHECK(format != Format::int8a8,
                  "format: expected float32, bfloat16, float16, int8 or int4 in columns, got ", name);
  const Rows<float> rows = rows_of<float>(x, "x");
  check_size(x, "x", 1, grid.in);
  const Dense<float> norm = dense_of<float>(norms, "norms", 2);
  check_size(norms, "norms", 0, grid.rows);
  check_size(norms, "norms", 1, grid.in);
  const Dense<float> added = bias_of<float>(bias, "bias", grid.out, x);

  const int64_t group = outputs_per_scale(format), unit = group ? group : PANEL;
  const int64_t height = smaller(grid.block_out, grid.out);
  const int64_t padded = ceil_div(height, unit) * unit;
  check_tensor(columns, "columns", column_type(format), 3);
  STD_TORCH_CHECK(columns.is_contiguous() && scale.is_contiguous(), "columns: expected contiguous memory");
  check_numel(columns, "columns", grid.in * grid.rows * padded * traits_of(format).bits / 8 /
                                      element_bytes(format));
  check_tensor(scale, "scale", ScalarType::Float, group ? 3 : 1);
  check_numel(scale, "scale", group ? grid.in * grid.rows * (padded / group) : 0);

  const TopK spec = top_k_spec(grid.rows * grid.in, open_blocks, grid.rows, Normalise::none);
  const int64_t kept = grid.rows * open_blocks, tokens = rows.count;
  const Tensor y = empty_tensor({tokens, grid.out}, ScalarType::Float);
  if (tokens == 0) return y;
  const Buffer<int64_t> open(tokens * kept);
  const int64_t parts = row_parts(tokens, spec.scores);
  run_tasks(parts, parts, [&](int64_t part) {
    for (int64_t t = tokens * part / parts; t < tokens * (part + 1) / parts; ++t)
      open_columns(spec, rows.data + t * rows.stride, norm.data, grid.in, open.get() + t * kept);
  });

  // With several tokens every column is read by some of them: four share what is read.
  const int64_t tiles = tokens / COLUMN_TOKENS, whole = tiles * COLUMN_TOKENS;
  const int64_t runs = tiles + tokens - whole, panels = ceil_div(height, PANEL);
  const int64_t threads = threads_for(tokens * kept * height);
  // Parts of a row of blocks, as many as keep all threads at work: whole cache lines of its columns, and long ones.
  const int64_t wanted = ceil_div((runs > 1 ? 4 : 1) * threads, runs * grid.rows);
  const int64_t chunk = threads == 1 ? panels : ceil_div(ceil_div(panels, wanted), 4) * 4;
  const int64_t chunks = ceil_div(panels, chunk);
  run_tasks(runs * grid.rows * chunks, threads, [&](int64_t task) {
    const int64_t run = task / chunks / grid.rows, row = task / chunks % grid.rows;
    const int64_t begin = task % chunks * chunk;
    const bool tile = run < tiles;
    const int64_t first = tile ? run * COLUMN_TOKENS : whole + run - tiles;
    ColumnArgs args{.columns = columns.const_data_ptr(),
                    .scale = static_cast<const float*>(scale.const_data_ptr()),
                    .format = format,
                    .rows = grid.rows,
                    .height = height,
                    .padded = padded,
                    .group = group,
                    .outputs = grid.out,
                    .x = rows.data + first * rows.stride,
                    .x_stride = grid.in,
                    .tokens = 1,
                    .open = open.get() + first * kept + row * open_blocks,
                    .count = open_blocks,
                    .bias = added.data,
                    .y = data_of<float>(y) + first * grid.out,
                    .y_stride = grid.out};
    Buffer<float> masked;
    if (tile) {
      masked = Buffer<float>(COLUMN_TOKENS * grid.in);
      std::memset(masked.get(), 0, COLUMN_TOKENS * grid.in * sizeof(float));
      for (int64_t t = 0; t < COLUMN_TOKENS; ++t)
        for (int64_t k = 0; k < open_blocks; ++k) {
          const int64_t column = args.open[t * kept + k];
          masked[t * grid.in + column] = rows.data[(first + t) * rows.stride + column];
        }
      args.x = masked.get();
      args.tokens = COLUMN_TOKENS;
      args.open = nullptr;
      args.count = grid.in;
    }
    kernels().columns(args, row, begin, smaller(panels, begin + chunk));
  });
  spoil_bad_rows(rows.data, rows.stride, tokens, grid.in, data_of<float>(y), grid.out);
  return y;
}

}  // namespace
}  // namespace blockgate

STABLE_TORCH_LIBRARY_IMPL(blockgate, CPU, m) {
  m.impl("column_linear", TORCH_BOX(&blockgate::column_linear));
}
