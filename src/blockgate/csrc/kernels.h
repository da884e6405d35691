// The contract between the kernels (isa/) and those who run them (host/, bind/): what is asked of a
// kernel set, whatever the instruction set. It lies above the three folders because it belongs to
// none of them; with the headers beside it, which it includes, it is all that they share.
//
// Only plain structs, function pointers and static functions: this header is part of every
// per-instruction-set translation unit, and a function shared between them could be merged into
// the copy that not every machine can run.
#pragma once

#include "formats.h"
#include "grid.h"
#include "screening.h"

#include <cstddef>
#include <cstdint>

namespace blockgate {

// One open gate. `slot` is its column in the (tokens, entries) gate tensor.
template <class T>
struct Entry {
  int32_t token;
  int32_t slot;
  T gate;
};

// Open gates grouped by block: block b owns entries[starts[b] .. starts[b + 1]), tokens ascending.
template <class T>
struct Groups {
  const int64_t* starts;
  const Entry<T>* entries;
};

// Rows of tokens, cut into blocks of columns: block b of token t starts at
// data + b * block_stride + t * stride. In place that is one row-major matrix; for larger batches
// the blocks are copied apart, because rows at a power-of-two distance evict each other.
template <class T>
struct BlockRows {
  const T* data;
  int64_t block_stride, stride;
};

// Inputs as int16 steps, for integer weights. An odd number of them in a block is followed by a 0.
struct QuantisedRows {
  BlockRows<int16_t> steps;
  const float* size;  // of a step: that of block b of token t at size[b * tokens + t]
  int64_t tokens;
  // Instead of `steps`, for kernels that take bytes: steps counted from the lowest of the row, and
  // what 0 is counted as, per token. Their number in a block is padded to a multiple of 4.
  BlockRows<uint8_t> bytes = {};
  const int32_t* zero = nullptr;
};

// How the inputs of one token are rounded to steps of one size, counted from `low` to `high`.
struct RowSteps {
  float size;
  int32_t low, high;
};

// y = bias + sum over open blocks of gate * (block x). groups.entries null: all open, gate 1.
template <class T>
struct ForwardArgs {
  Grid grid;
  BlockRows<T> x;
  const T* row_major;  // an ordinary (out, in) weight, packed on the way; null: `packed` has it
  PackedView packed;
  const T* bias;
  T* y;
  Groups<T> groups;
  QuantisedRows quantised = {};  // instead of x where the format takes steps
};

// The part of the output one task owns, for some tokens: some panels of a row of blocks, or
// several whole rows.
struct ForwardTask {
  int64_t row_begin, row_end, panel_begin, panel_end, token_begin, token_end;
};

// An open block of the only token of the batch.
struct OpenBlock {
  int32_t row, col;
  float gate;
};

// The forward product of one token over packed blocks; blocks ascending in block order.
struct StreamArgs {
  Grid grid;
  const float* x;
  PackedView packed;
  const float* bias;
  float* y;
  const void* then;  // weights to fetch ahead at the end, or null
  bool begun = false;  // whether the first weights were fetched ahead so
  QuantisedRows quantised = {};  // instead of x where the format takes steps
};

// y = bias + sum over open columns of x * column, for one token, or for COLUMN_TOKENS whose inputs
// are 0 where they are closed. Columns lie as [column][row of blocks][padded output].
static constexpr int64_t COLUMN_TOKENS = 4;
struct ColumnArgs {
  const void* columns;
  const float* scale;  // [column][row of blocks][group of outputs], or null
  Format format;
  int64_t rows, height, padded;  // rows of blocks, their outputs, those with padding
  int64_t group;                 // outputs that share a scale; 0: there are no scales
  int64_t outputs;
  const float* x;
  int64_t x_stride, tokens;
  const int64_t* open;  // columns, ascending; null: the first `count`
  int64_t count;
  const float* bias;  // or null
  float* y;
  int64_t y_stride;
};

template <class T>
struct BackwardArgs {
  Grid grid;
  BlockRows<T> grad_y;
  BlockRows<T> x;
  const T* weight;
  T* grad_x;       // null: not needed
  T* grad_gates;   // null: not needed
  T* grad_weight;  // null: not needed
  int64_t slots;   // columns of grad_gates
  Groups<T> groups;
};

// The part of grad_x one task owns: some columns of blocks, for some tokens.
struct InputGradTask {
  int64_t col_begin, col_end, token_begin, token_end;
};

// The part of grad_weight one task owns: some blocks of one row.
struct WeightGradTask {
  int64_t row, col_begin, col_end;
};

// margin: values are distances to the runner-up, scaled as for rms; the second kind, for layers that
// were trained without gates, adds more to each.
enum class Normalise { mean, rms, none, margin, margin_near_dense };

static constexpr bool is_margin(Normalise rule) {
  return rule == Normalise::margin || rule == Normalise::margin_near_dense;
}

struct TopK {
  int64_t scores, open_blocks, groups;
  Normalise normalise;
};

// Elements of T that selection in one row needs as scratch, and its gradient.
static constexpr int64_t top_k_scratch(const TopK& spec) {
  return spec.groups + 2 * (spec.scores / spec.groups + PANEL);
}

// The product of one step of a recurrence, added to y (tokens, out).
template <class T>
struct StepProduct {
  Grid grid;
  PackedView packed;
  const T* x;
  int64_t x_stride, tokens;
  T* y;
  // Compact gates (tokens, slots), indices ascending; null: all blocks open, gate 1.
  const T* gates;
  const int64_t* indices;
  int64_t slots;
  // (tokens, rows + 1): the slots at which each row of blocks begins and ends.
  const int32_t* row_starts;
  // A single token: the weights that are read after this product, or null.
  const void* then;
  bool begun = false;  // as in StreamArgs
  QuantisedRows quantised = {};  // instead of x where the format takes steps
};

// The gradient of x (tokens, in) and of the gates in one step. Tokens count over all steps.
template <class T>
struct StepInputGrad {
  Grid grid;
  const T* weight;  // see input_grad_block_size
  const T* grad_y;
  const T* x;
  T* grad_x;      // of the step's first token
  T* grad_gates;  // of the step's first token
  int64_t slots;
  const Entry<T>* entries;
  const int64_t *begins, *ends;  // of the step's entries, per block
  int64_t token_begin, token_end;
};

// Inputs in one panel of the weights for grad_x. Blocks of fewer than 16 inputs have narrower
// panels, whose vectors hold several outputs instead of padding.
static constexpr int64_t input_panel(int64_t inputs) {
  int64_t width = PANEL;
  while (width / 2 >= inputs) width /= 2;
  return width;
}

// Weights for StepInputGrad: block -> panels of inputs -> groups of 16 / panel outputs -> inputs ->
// outputs of the group, zero padded. In panels of 16 inputs a group is one output.
static constexpr int64_t input_grad_block_size(const Grid& g) {
  const int64_t width = input_panel(packed_depth(g));
  const int64_t groups = ceil_div(smaller(g.block_out, g.out), PANEL / width);
  return ceil_div(packed_depth(g), width) * groups * PANEL;
}

// The cells of recurrences, in torch's order of their gates: i, f, g, o of an LSTM, r, z, n of a GRU.
enum class Cell { lstm, gru };

enum class Activation { gelu, gelu_tanh, relu, silu };

static constexpr int64_t cell_gates(Cell cell) { return cell == Cell::lstm ? 4 : 3; }

// One step of a cell for tokens of `size` units. `activations` are (tokens, gates, size): before the call the sums
// that enter the cell's gates, after it their values. What else a cell needs:
//          before      sums of the input         c
//   lstm   c           in `activations`, added   the new c
//   gru    h           in `input`, like them     the state's sum of n (or null: nobody asks)
template <class T>
struct CellForward {
  Cell cell;
  int64_t size;
  T* activations;
  const T* input;
  const T* before;
  T* c;
  T* h;
};

// grad_carry holds what the step after this one hands back to the state, and then what this one does: an LSTM's
// gradient of c, a GRU's part of the gradient of h that passes no product. grad_output may be null. grad_sums are the
// gradients of the sums, and grad_input of those of the input where a cell keeps them apart.
template <class T>
struct CellBackward {
  Cell cell;
  int64_t size;
  const T *activations, *before, *c, *grad_output, *grad_h;
  T *grad_carry, *grad_sums, *grad_input;
};

template <class T>
struct TypedKernels {
  void (*forward)(const ForwardArgs<T>&, const ForwardTask&, T* scratch);
  void (*input_grad)(const BackwardArgs<T>&, const InputGradTask&, T* scratch);
  void (*weight_grad)(const BackwardArgs<T>&, const WeightGradTask&, T* scratch);
  // Elements of T that the calls above need as scratch for tasks of at most that size.
  int64_t (*forward_scratch)(const Grid&, int64_t rows, int64_t tokens);
  int64_t (*input_grad_scratch)(const Grid&, int64_t cols, int64_t tokens);
  int64_t (*weight_grad_scratch)(const Grid&, int64_t cols);
  // One row of scores: the kept ones of some groups, and then, once all groups are there, the gates
  // that they become. Pointers are those of the whole row; `scratch` holds
  // top_k_scratch elements of T.
  void (*select)(const TopK&, int64_t group_begin, int64_t group_end, const T* scores, T* kept,
                 int64_t* indices, T* scratch);
  void (*normalise)(const TopK&, T* gates);
  // One row. With margins, `runners` (groups) receives the
  // indices of the scores that have a gradient besides the kept ones. `scratch` as above.
  void (*top_k_backward)(const TopK&, const T* grad_gates, const T* scores, const T* gates,
                         const int64_t* indices, T* grad_scores, int64_t* runners, T* scratch);
  // A weight (rows x columns, rows `stride` apart) to panels of 16 rows, or of columns as
  // StepInputGrad has them.
  void (*transpose_to_panels)(const T* weight, int64_t stride, int64_t rows, int64_t columns, T* panels);
  void (*copy_to_panels)(const T* weight, int64_t stride, int64_t rows, int64_t columns, T* panels);
  // Panels [panel_begin, panel_end) of one row of blocks.
  void (*step_product)(const StepProduct<T>&, int64_t row, int64_t panel_begin, int64_t panel_end,
                       std::byte* scratch);
  int64_t (*step_product_scratch)(const Grid&, int64_t tokens);  // bytes
  void (*step_input_grad)(const StepInputGrad<T>&, int64_t col);
  // to (tokens, stride)[.., begin:end] = from + bias; from null: 0, and it may be `to`.
  void (*add_bias)(const T* from, const T* bias, int64_t tokens, int64_t stride, int64_t begin, int64_t end, T* to);
  void (*cell_forward)(const CellForward<T>&, int64_t token, int64_t unit_begin, int64_t unit_end);
  void (*cell_backward)(const CellBackward<T>&, int64_t token);
  // y (width) += sum of values[indices[i]] * weight[indices[i]]; indices null: 0, 1, 2 ...
  void (*add_rows)(const T* weight, int64_t width, const T* values, const int64_t* indices, int64_t count, T* y);
};

struct KernelTable {
  const char* name;
  // Whether this machine has the instructions.
  bool (*runs_here)();
  TypedKernels<float> f32;
  TypedKernels<double> f64;
  // Panels that `stream` handles best in one task.
  int64_t stream_panels;
  // Outputs [panel_begin, panel_end) of one row of blocks; `open` are that row's open blocks.
  void (*stream)(const StreamArgs&, int64_t row, int64_t panel_begin, int64_t panel_end,
                 const OpenBlock* open, int64_t count);
  // Panels [panel_begin, panel_end) of one row of blocks.
  void (*columns)(const ColumnArgs&, int64_t row, int64_t panel_begin, int64_t panel_end);
  // One token's inputs of one block to int16 steps, an even number of them; the largest becomes
  // `largest_steps`. Returns the size of a step.
  float (*quantise)(const float* x, int64_t depth, int64_t largest_steps, int16_t* steps);
  // What a scan reads of one token's `depth` inputs.
  ScreenNorms (*screen_input)(const float* x, int64_t depth, const ScreenInput& to);
  // Bounds of the rows in panels [begin, end).
  void (*screen)(const ScreenRows&, const ScreenInput&, const ScreenSlack&, int64_t begin, int64_t end,
                 const ScreenBounds&);
  // The exact score of one row of a weight; `next` is the row to fetch meanwhile, or null.
  float (*exact_score)(const float* row, int64_t depth, const double* x, float bias, const float* next);
  // As `quantise`, with one size for all `count` inputs: first that size, then each block's inputs as
  // int16, an even number of them, or as bytes, a multiple of 4.
  RowSteps (*measure_row)(const float* x, int64_t count, int64_t largest_steps);
  void (*quantise_by)(const RowSteps&, const float* x, int64_t depth, int16_t* steps);
  void (*quantise_to_bytes)(const RowSteps&, const float* x, int64_t depth, uint8_t* bytes);
  // Whether `forward` takes inputs as bytes.
  bool takes_bytes;
  // hidden = f(hidden), times `factor` unless it is null.
  void (*activate)(Activation kind, const float* factor, int64_t count, float* hidden);
};

extern const KernelTable baseline_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
extern const KernelTable avx512vnni_kernels;
#endif

}  // namespace blockgate
