// Products with open columns of a weight: every input that is open reads its column as one stream.
//
// For one token the sums of all outputs lie in the cache while columns pass, a few side by side. For
// four tokens a tile holds the sums of some outputs in registers instead, since the columns it
// shares are in the cache. Each output is the sum over its columns in ascending order, whatever the
// way: a closed column adds 0 where another token of the tile reads it.
#pragma once

#include "isa/format_bfloat16.h"
#include "isa/format_float16.h"

namespace blockgate::BLOCKGATE_ISA {

// Sixteen outputs of a column as float.
BLOCKGATE_INLINE void load_column_panel(const float* column, int64_t panel, Vec<float> (&w)[PANEL_VECTORS<float>]) {
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS<float>; ++v) w[v] = load(column + panel * PANEL + v * LANES<float>);
}

BLOCKGATE_INLINE void load_column_panel(const BFloat16* column, int64_t panel, Vec<float> (&w)[PANEL_VECTORS<float>]) {
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS<float>; ++v) w[v] = load_weight(column + panel * PANEL + v * LANES<float>);
}

BLOCKGATE_INLINE void load_column_panel(const Float16* column, int64_t panel, Vec<float> (&w)[PANEL_VECTORS<float>]) {
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS<float>; ++v) w[v] = load_weight(column + panel * PANEL + v * LANES<float>);
}

BLOCKGATE_INLINE void load_column_panel(const int8_t* column, int64_t panel, Vec<float> (&w)[PANEL_VECTORS<float>]) {
  SignedLanes lanes;
  widen(column + panel * PANEL, lanes);
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS<float>; ++v) w[v] = __builtin_convertvector(lanes[v], Vec<float>);
}

// int4: the lower halves of sixteen bytes are one panel, the upper halves the next.
struct Nibbles {
  uint8_t pair;
};
BLOCKGATE_INLINE void load_column_panel(const Nibbles* column, int64_t panel, Vec<float> (&w)[PANEL_VECTORS<float>]) {
  PanelLanes lanes;
  widen(&column->pair + panel / 2 * PANEL, lanes);
  const int up = panel % 2 ? 24 : 28;
#pragma GCC unroll 4
  for (int v = 0; v < PANEL_VECTORS<float>; ++v)
    w[v] = __builtin_convertvector((Vec<int32_t>)(lanes[v] << up) >> 28, Vec<float>);
}

// Bytes of one panel of a column.
template <class W>
inline constexpr int64_t COLUMN_BYTES_OF_PANEL = PANEL * int64_t(sizeof(W));
template <>
inline constexpr int64_t COLUMN_BYTES_OF_PANEL<Nibbles> = PANEL / 2;

// The part of a column that one row of blocks has, its scales, and how far it is to the next column.
template <class W>
struct ColumnPlace {
  const char* weights;
  const float* scales;  // or null
  int64_t stride, groups;

  BLOCKGATE_INLINE ColumnPlace(const ColumnArgs& args, int64_t row) {
    const int64_t bytes = args.padded / PANEL * COLUMN_BYTES_OF_PANEL<W>;
    groups = args.group ? args.padded / args.group : 0;
    weights = static_cast<const char*>(args.columns) + row * bytes;
    scales = args.group ? args.scale + row * groups : nullptr;
    stride = args.rows * bytes;
    groups *= args.rows;
  }
};

// y = sums of outputs [first, first + count) of a row of blocks, with the bias.
BLOCKGATE_INLINE void write_outputs(const ColumnArgs& args, int64_t row, int64_t first, int64_t count, const float* sums,
                                    float* y) {
  float* to = y + row * args.height + first;
  const float* bias = args.bias ? args.bias + row * args.height + first : nullptr;
  count = smaller(count, smaller(args.height - first, args.outputs - row * args.height - first));
  for (int64_t o = 0; o < count; ++o) to[o] = bias ? sums[o] + bias[o] : sums[o];
}

// y of COLUMN_TOKENS tokens that share all columns, panels [panel, panel + PANELS) of one row of blocks.
template <int TOKENS, int PANELS, class W>
BLOCKGATE_INLINE void column_tile(const ColumnArgs& args, int64_t row, int64_t panel) {
  constexpr int VECTORS = PANEL_VECTORS<float>;
  const ColumnPlace<W> place(args, row);
  Vec<float> sums[TOKENS][PANELS][VECTORS] = {};
  for (int64_t column = 0; column < args.count; ++column) {
    const W* weights = reinterpret_cast<const W*>(place.weights + column * place.stride);
    const float* scales = place.scales ? place.scales + column * place.groups : nullptr;
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p) {
      Vec<float> w[VECTORS];
      load_column_panel(weights, panel + p, w);
      const float scale = scales ? scales[(panel + p) * PANEL / args.group] : 1.0f;
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; ++t) {
        const Vec<float> x = broadcast(args.x[t * args.x_stride + column] * scale);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[t][p][v] = multiply_add(w[v], x, sums[t][p][v]);
      }
    }
  }
  for (int t = 0; t < TOKENS; ++t) {
    float y[PANELS * PANEL];
#pragma GCC unroll 16
    for (int p = 0; p < PANELS; ++p)
      for (int v = 0; v < VECTORS; ++v) store(y + p * PANEL + v * LANES<float>, sums[t][p][v]);
    write_outputs(args, row, panel * PANEL, PANELS * PANEL, y, args.y + t * args.y_stride);
  }
}

// Columns of one token that pass side by side: their sums are read and written once.
inline constexpr int COLUMNS_BESIDE = 4;
// Bytes that are fetched ahead, about.
inline constexpr int64_t COLUMN_BYTES_AHEAD = 6144;
// Panels whose sums stay in the nearest cache while all columns pass.
inline constexpr int64_t COLUMN_SUMS = 256;

// Adds COLUMNS columns, open[0] and the following, to the sums of panels [begin, end). As many are fetched ahead, from
// `ahead` on where that isn't null.
template <int COLUMNS, class W>
BLOCKGATE_INLINE void add_columns(const ColumnArgs& args, const ColumnPlace<W>& place, const int64_t* open,
                                  const int64_t* ahead, int64_t begin, int64_t end, float* sums) {
  constexpr int VECTORS = PANEL_VECTORS<float>;
  const int64_t step = args.group ? args.group / PANEL : 4;
  for (int64_t panel = begin; panel < end;) {
    const int64_t stop = smaller(end, (panel / step + 1) * step), at = panel * COLUMN_BYTES_OF_PANEL<W>;
    Vec<float> x[COLUMNS];
#pragma GCC unroll 8
    for (int c = 0; c < COLUMNS; ++c) {
      const float scale = place.scales ? place.scales[open[c] * place.groups + panel / step] : 1.0f;
      x[c] = broadcast(args.x[open[c]] * scale);
      if (ahead)
        for (int64_t byte = at & -64; byte < stop * COLUMN_BYTES_OF_PANEL<W>; byte += 64)
          if (byte >= at || panel == begin) __builtin_prefetch(place.weights + ahead[c] * place.stride + byte);
    }
    for (; panel < stop; ++panel, sums += PANEL) {
      Vec<float> sum[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) sum[v] = load(sums + v * LANES<float>);
#pragma GCC unroll 8
      for (int c = 0; c < COLUMNS; ++c) {
        Vec<float> w[VECTORS];
        load_column_panel(reinterpret_cast<const W*>(place.weights + open[c] * place.stride), panel, w);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sum[v] = multiply_add(w[v], x[c], sum[v]);
      }
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(sums + v * LANES<float>, sum[v]);
    }
  }
}

// y of one token, panels [begin, end) of one row of blocks, at most COLUMN_SUMS.
template <class W>
BLOCKGATE_INLINE void stream_columns(const ColumnArgs& args, int64_t row, int64_t begin, int64_t end) {
  const ColumnPlace<W> place(args, row);
  const int64_t bytes = (end - begin) * COLUMN_BYTES_OF_PANEL<W>;
  const int64_t distance = ceil_div(COLUMN_BYTES_AHEAD, COLUMNS_BESIDE * bytes) * COLUMNS_BESIDE;
  alignas(64) float sums[COLUMN_SUMS * PANEL];
  __builtin_memset(sums, 0, (end - begin) * PANEL * sizeof(float));
  int64_t i = 0;
  for (; i + COLUMNS_BESIDE <= args.count; i += COLUMNS_BESIDE) {
    const int64_t then = i + distance;
    const int64_t* ahead = then + COLUMNS_BESIDE <= args.count ? args.open + then : nullptr;
    add_columns<COLUMNS_BESIDE>(args, place, args.open + i, ahead, begin, end, sums);
  }
  for (; i < args.count; ++i) add_columns<1>(args, place, args.open + i, nullptr, begin, end, sums);
  write_outputs(args, row, begin * PANEL, (end - begin) * PANEL, sums, args.y);
}

template <int TOKENS, int PANELS, class W>
BLOCKGATE_INLINE void column_panels(const ColumnArgs& args, int64_t row, int64_t begin, int64_t end) {
  for (; begin + PANELS <= end; begin += PANELS) column_tile<TOKENS, PANELS, W>(args, row, begin);
  if constexpr (PANELS > 1) column_panels<TOKENS, PANELS / 2, W>(args, row, begin, end);
}

constexpr int column_tile_panels(int tokens) {
  int panels = 1;
  while (2 * panels * tokens * PANEL_VECTORS<float> <= BLOCKGATE_ACCUMULATORS) panels *= 2;
  return panels;
}

template <class W>
BLOCKGATE_INLINE void columns_of(const ColumnArgs& args, int64_t row, int64_t begin, int64_t end) {
  if (args.tokens == COLUMN_TOKENS)
    return column_panels<COLUMN_TOKENS, column_tile_panels(COLUMN_TOKENS), W>(args, row, begin, end);
  for (; begin < end; begin += COLUMN_SUMS) stream_columns<W>(args, row, begin, smaller(end, begin + COLUMN_SUMS));
}

inline void columns(const ColumnArgs& args, int64_t row, int64_t panel_begin, int64_t panel_end) {
  switch (args.format) {
    case Format::float32: return columns_of<float>(args, row, panel_begin, panel_end);
    case Format::bfloat16: return columns_of<BFloat16>(args, row, panel_begin, panel_end);
    case Format::float16: return columns_of<Float16>(args, row, panel_begin, panel_end);
    case Format::int8a8:  // has no columns of its own: packing stores int8
    case Format::int8: return columns_of<int8_t>(args, row, panel_begin, panel_end);
    case Format::int4: return columns_of<Nibbles>(args, row, panel_begin, panel_end);
  }
}

}  // namespace blockgate::BLOCKGATE_ISA
