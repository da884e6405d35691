#include "host/bad_rows.h"
#include "host/packed.h"
#include "host/quantised_rows.h"

#include <vector>

namespace blockgate {
namespace {

// Open blocks of one token in block order. The sort is stable: equal indices keep their order.
std::vector<OpenBlock> open_blocks_of(const Grid& grid, const float* gates, const int64_t* indices,
                                      int64_t slots) {
  std::vector<OpenBlock> open;
  open.reserve(slots);
  const int64_t num_blocks = grid.rows * grid.cols;
  bool ascending = true;
  int64_t previous = 0, row = 0;
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t block = indices[s];
    STD_TORCH_CHECK(uint64_t(block) < uint64_t(num_blocks),
                    "indices: expected block indices in [0, ", num_blocks, "), got ", block);
    if (gates[s] == 0) continue;
    ascending &= block >= previous;
    previous = block;
    // Ascending indices step through the rows: no division needed.
    if (ascending) while (block >= (row + 1) * grid.cols) ++row;
    else row = block / grid.cols;
    open.push_back({int32_t(row), int32_t(block - row * grid.cols), gates[s]});
  }
  if (!ascending)
    std::stable_sort(open.begin(), open.end(), [](const OpenBlock& a, const OpenBlock& b) {
      return a.row != b.row ? a.row < b.row : a.col < b.col;
    });
  return open;
}

QuantisedCopy quantise_rows(const Grid& grid, Format format, const float* x, int64_t x_stride,
                            int64_t tokens) {
  QuantisedCopy rows = quantised_room(grid, tokens, in_bytes(grid, format, tokens));
  // A few tokens at a time, so that both sides move along whole runs of memory.
  constexpr int64_t RUN = 8;
  run_tasks(ceil_div(tokens, RUN), threads_for(tokens * grid.in * 4), [&](int64_t run) {
    quantise_tokens(grid, format, x, x_stride, run * RUN, smaller((run + 1) * RUN, tokens), rows);
  });
  return rows;
}

// Several tokens; `open` is the number of open (token, block) pairs.
void run_batch(const PackedWeight& weight, const Grid& grid, const float* x, int64_t x_stride,
               int64_t tokens, const float* bias, float* y, const Groups<float>& groups,
               int64_t open) {
  ForwardArgs<float> args{.grid = grid, .packed = weight.view(), .bias = bias, .y = y, .groups = groups};
  BlockRowsCopy<float> blocked;
  QuantisedCopy quantised;
  if (takes_steps(weight.format)) {
    quantised = quantise_rows(grid, weight.format, x, x_stride, tokens);
    args.quantised = quantised.view;
  } else {
    blocked = block_rows(x, x_stride, tokens, grid.in, grid.block_in);
    args.x = blocked.view;
  }
  run_forward<float>(args, tokens, open);
}

// The only token, or one after the other, in the rows of blocks [row_begin, row_end); `open` are blocks of these rows,
// ascending.
void run_stream(const StreamArgs& given, const OpenBlock* open, int64_t count, int64_t row_begin, int64_t row_end) {
  const Grid& grid = given.grid;
  const KernelTable& table = kernels();
  StreamArgs args = given;
  QuantisedCopy quantised;
  if (takes_steps(args.packed.format)) {
    quantised = quantise_rows(grid, args.packed.format, args.x, grid.in, 1);
    args.quantised = quantised.view;
  }
  const int64_t threads = threads_for(count * packed_block_size(grid));
  // Whole blocks, which are the longest runs of memory, where there are rows enough to share out.
  const int64_t parts = smaller(ceil_div(packed_panels(grid), table.stream_panels),
                                ceil_div(2 * TASKS_PER_THREAD * threads, row_end - row_begin));
  const int64_t part_panels =
      ceil_div(packed_panels(grid), parts * table.stream_panels) * table.stream_panels;
  std::vector<int64_t> starts(row_end - row_begin + 1);
  int64_t position = 0;
  for (int64_t row = row_begin; row < row_end; ++row) {
    starts[row - row_begin] = position;
    while (position < count && open[position].row == row) ++position;
  }
  starts[row_end - row_begin] = position;
  run_tasks((row_end - row_begin) * parts, threads, [&](int64_t i) {
    const int64_t row = row_begin + i / parts, panel = i % parts * part_panels;
    const int64_t row_panels = ceil_div(outputs_of_row(grid, row), PANEL);
    const int64_t panel_end = smaller(panel + part_panels, row_panels);
    if (panel < panel_end)
      table.stream(args, row, panel, panel_end, open + starts[i / parts],
                   starts[i / parts + 1] - starts[i / parts]);
  });
}

std::vector<OpenBlock> all_open(const Grid& grid, int64_t row_begin, int64_t row_end) {
  std::vector<OpenBlock> open;
  open.reserve((row_end - row_begin) * grid.cols);
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t col = 0; col < grid.cols; ++col) open.push_back({int32_t(row), int32_t(col), 1});
  return open;
}

}  // namespace

void run_packed_rows(const PackedWeight& weight, const Grid& grid, const float* x, const float* bias, float* y,
                     int64_t row_begin, int64_t row_end) {
  const std::vector<OpenBlock> open = all_open(grid, row_begin, row_end);
  run_stream({.grid = grid, .x = x, .packed = weight.view(), .bias = bias, .y = y, .then = nullptr}, open.data(),
             int64_t(open.size()), row_begin, row_end);
}

void run_packed_dense(const PackedWeight& weight, const Grid& grid, const float* x,
                      int64_t x_stride, int64_t tokens, const float* bias, float* y,
                      Regime regime) {
  if (tokens > 1 && regime == Regime::grouped)
    return run_batch(weight, grid, x, x_stride, tokens, bias, y, {nullptr, nullptr},
                     tokens * grid.rows * grid.cols);
  const std::vector<OpenBlock> open = all_open(grid, 0, grid.rows);
  for (int64_t t = 0; t < tokens; ++t)
    run_stream({.grid = grid,
                .x = x + t * x_stride,
                .packed = weight.view(),
                .bias = bias,
                .y = y + t * grid.out,
                .then = nullptr},
               open.data(), int64_t(open.size()), 0, grid.rows);
}

void run_packed(const PackedWeight& weight, const Grid& grid, const float* x, int64_t x_stride,
                int64_t tokens, const float* bias, const float* gates, const int64_t* indices,
                int64_t slots, float* y, Regime regime) {
  if (tokens > 1 && regime == Regime::grouped) {
    const GroupedGates<float> groups =
        group_by_block<float>(gates, indices, tokens, slots, grid.rows * grid.cols);
    run_batch(weight, grid, x, x_stride, tokens, bias, y, groups.view(),
              groups.starts[grid.rows * grid.cols]);
  } else {
    for (int64_t t = 0; t < tokens; ++t) {
      const std::vector<OpenBlock> open =
          open_blocks_of(grid, gates + t * slots, indices + t * slots, slots);
      run_stream({.grid = grid,
                  .x = x + t * x_stride,
                  .packed = weight.view(),
                  .bias = bias,
                  .y = y + t * grid.out,
                  .then = nullptr},
                 open.data(), int64_t(open.size()), 0, grid.rows);
    }
  }
  spoil_bad_rows(x, x_stride, tokens, grid.in, y, grid.out);
}

}  // namespace blockgate
