// Runs the baseline kernels on the problems of results.bin and compares them with what the reference
// made of them. It needs no torch, so it also runs where torch does not: under qemu, after a
// cross-compiler.
//
//   g++ -std=c++20 -O2 -I src/blockgate/csrc driver.cpp .../isa/kernels_baseline.cpp -o driver
//   ./driver results.bin
#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

using namespace blockgate;

namespace {

const KernelTable& table = baseline_kernels;

struct Array {
  char kind;
  std::vector<char> bytes;
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes.data());
  }
};

std::map<std::string, Array> arrays;

// See to_bytes in make_results.py. All machines of interest are little-endian.
void read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const auto number = [&] {
    int64_t value = 0;
    file.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
  };
  for (int64_t count = number(); count > 0; --count) {
    std::string name(number(), 0);
    file.read(name.data(), name.size());
    Array array{char(file.get()), {}};
    array.bytes.resize(number());
    file.read(array.bytes.data(), array.bytes.size());
    arrays[name] = std::move(array);
  }
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path);
    std::exit(2);
  }
}

const Array& get(const std::string& name) {
  const auto found = arrays.find(name);
  if (found == arrays.end()) {
    std::fprintf(stderr, "results have no %s\n", name.c_str());
    std::exit(2);
  }
  return found->second;
}

int compared = 0, wrong = 0;

// Errors count relative to the largest number of the array: sums cancel.
template <class T>
void compare(const std::string& name, const std::vector<T>& got, double tolerance) {
  const Array& array = get(name);
  const T* want = array.as<T>();
  const size_t size = array.bytes.size() / sizeof(T);
  double largest = 1e-30, error = size == got.size() ? 0 : INFINITY;
  for (size_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(double(want[i])));
  for (size_t i = 0; i < std::min(size, got.size()); ++i) {
    const double difference = std::fabs(double(got[i]) - double(want[i])) / largest;
    // NaN is no match either.
    error = difference <= error ? error : difference;
  }
  ++compared;
  const bool good = error <= tolerance;
  wrong += !good;
  std::printf("%s %-44s error %.1e, %zu numbers\n", good ? "ok   " : "WRONG", name.c_str(), error, size);
}

template <class T>
const TypedKernels<T>& typed() {
  if constexpr (sizeof(T) == sizeof(float)) return table.f32;
  else return table.f64;
}

template <class T>
constexpr double TOLERANCE = sizeof(T) == sizeof(float) ? 2e-6 : 1e-14;

// Grids as make_results.py writes them: out, in, block, rows and columns of blocks, tokens, slots.
struct Problem {
  Grid grid;
  int64_t tokens, slots;
};

Problem problem_of(const std::string& name) {
  const int64_t* g = get(name + "grid").as<int64_t>();
  return {{g[0], g[1], g[2], g[3], g[4], g[5]}, g[6], g[7]};
}

template <class T>
struct Grouped {
  std::vector<int64_t> starts;
  std::vector<Entry<T>> entries;
  Groups<T> view() const { return {starts.data(), entries.data()}; }
};

template <class T>
Grouped<T> group(const Problem& p, const T* gates, const int64_t* indices) {
  Grouped<T> made;
  for (int64_t block = 0; block < p.grid.rows * p.grid.cols; ++block) {
    made.starts.push_back(int64_t(made.entries.size()));
    for (int64_t t = 0; t < p.tokens; ++t)
      for (int64_t s = 0; s < p.slots; ++s)
        if (indices[t * p.slots + s] == block && gates[t * p.slots + s] != T(0))
          made.entries.push_back({int32_t(t), int32_t(s), gates[t * p.slots + s]});
  }
  made.starts.push_back(int64_t(made.entries.size()));
  return made;
}

// One task for each row of blocks.
template <class T>
std::vector<T> forward(const Problem& p, ForwardArgs<T> args) {
  std::vector<T> y(p.tokens * p.grid.out, T(NAN)), scratch(typed<T>().forward_scratch(p.grid, 1, p.tokens));
  args.y = y.data();
  for (int64_t row = 0; row < p.grid.rows; ++row)
    typed<T>().forward(args, {row, row + 1, 0, packed_panels(p.grid), 0, p.tokens}, scratch.data());
  return y;
}

template <class T>
void check_linear(const std::string& name) {
  const Problem p = problem_of(name);
  const Grid& grid = p.grid;
  const T *x = get(name + "x").as<T>(), *weight = get(name + "weight").as<T>();
  const Grouped<T> groups = group<T>(p, get(name + "gates").as<T>(), get(name + "indices").as<int64_t>());
  compare(name + "y",
          forward<T>(p, {.grid = grid,
                         .x = {x, grid.block_in, grid.in},
                         .row_major = weight,
                         .packed = {},
                         .bias = get(name + "bias").as<T>(),
                         .y = nullptr,
                         .groups = groups.view()}),
          TOLERANCE<T>);

  std::vector<T> grad_x(p.tokens * grid.in, T(NAN)), grad_weight(grid.out * grid.in, T(NAN));
  std::vector<T> grad_gates(p.tokens * p.slots, T(0));
  const BackwardArgs<T> args{grid,
                             {get(name + "grad_y").as<T>(), grid.block_out, grid.out},
                             {x, grid.block_in, grid.in},
                             weight,
                             grad_x.data(),
                             grad_gates.data(),
                             grad_weight.data(),
                             p.slots,
                             groups.view()};
  std::vector<T> scratch(typed<T>().input_grad_scratch(grid, 1, p.tokens) + typed<T>().weight_grad_scratch(grid, 1));
  for (int64_t col = 0; col < grid.cols; ++col) {
    typed<T>().input_grad(args, {col, col + 1, 0, p.tokens}, scratch.data());
    for (int64_t row = 0; row < grid.rows; ++row)
      typed<T>().weight_grad(args, {row, col, col + 1}, scratch.data());
  }
  compare(name + "grad_x", grad_x, TOLERANCE<T>);
  compare(name + "grad_weight", grad_weight, TOLERANCE<T>);
  compare(name + "grad_gates", grad_gates, TOLERANCE<T>);
}

// Inputs as steps, as kernels of integer formats read them.
struct Steps {
  std::vector<int16_t> steps;
  std::vector<float> size;
  QuantisedRows view;
};

Steps quantise(const Problem& p, Format format, const float* x) {
  const Grid& grid = p.grid;
  const int64_t stride = ceil_div(packed_depth(grid), 2) * 2, block = p.tokens * stride;
  Steps made{std::vector<int16_t>(grid.cols * block), std::vector<float>(grid.cols * p.tokens), {}};
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* row = x + t * grid.in;
    const RowSteps all = table.measure_row(row, grid.in, largest_steps(format, packed_depth(grid)));
    for (int64_t col = 0; col < grid.cols; ++col) {
      const int64_t depth = inputs_of_col(grid, col);
      const float* part = row + col * grid.block_in;
      int16_t* to = made.steps.data() + col * block + t * stride;
      float& size = made.size[col * p.tokens + t];
      if (steps_by_row(format)) {
        table.quantise_by(all, part, depth, to);
        size = all.size;
      } else {
        size = table.quantise(part, depth, largest_steps(format, depth), to);
      }
    }
  }
  made.view = {.steps = {made.steps.data(), block, stride}, .size = made.size.data(), .tokens = p.tokens};
  return made;
}

// All tokens at once, and one after the other: both must give the reference's numbers.
void check_packed(const std::string& grid_name, Format format) {
  const std::string given = "linear." + grid_name + ".f32.";
  const std::string name = "packed." + grid_name + "." + traits_of(format).name + ".";
  const Problem p = problem_of(given);
  const Grid& grid = p.grid;
  const Array& scale = get(name + "scale");
  const PackedView packed{get(name + "blocks").as<char>(), scale.bytes.empty() ? nullptr : scale.as<float>(), format};
  const float *x = get(given + "x").as<float>(), *bias = get(given + "bias").as<float>();
  const float* gates = get(given + "gates").as<float>();
  const int64_t* indices = get(given + "indices").as<int64_t>();
  const Grouped<float> groups = group<float>(p, gates, indices);

  ForwardArgs<float> args{.grid = grid, .packed = packed, .bias = bias, .y = nullptr, .groups = groups.view()};
  const Steps steps = takes_steps(format) ? quantise(p, format, x) : Steps{};
  if (takes_steps(format)) args.quantised = steps.view;
  else args.x = {x, grid.block_in, grid.in};
  const std::vector<float> together = forward<float>(p, args);
  compare(name + "y", together, TOLERANCE<float>);

  std::vector<float> y(p.tokens * grid.out, NAN);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const Problem one{grid, 1, p.slots};
    const Steps own = takes_steps(format) ? quantise(one, format, x + t * grid.in) : Steps{};
    const StreamArgs stream{.grid = grid,
                            .x = x + t * grid.in,
                            .packed = packed,
                            .bias = bias,
                            .y = y.data() + t * grid.out,
                            .then = nullptr,
                            .quantised = own.view};
    for (int64_t row = 0; row < grid.rows; ++row) {
      std::vector<OpenBlock> open;
      for (int64_t s = t * p.slots; s < (t + 1) * p.slots; ++s)
        if (gates[s] != 0 && indices[s] / grid.cols == row)
          open.push_back({int32_t(row), int32_t(indices[s] % grid.cols), gates[s]});
      const int64_t panels = ceil_div(outputs_of_row(grid, row), PANEL);
      for (int64_t panel = 0; panel < panels; panel += table.stream_panels)
        table.stream(stream, row, panel, std::min(panels, panel + table.stream_panels), open.data(),
                     int64_t(open.size()));
    }
  }
  compare(name + "y", y, TOLERANCE<float>);
  // The library's promise: one result, however it is run.
  const bool same = std::memcmp(y.data(), together.data(), y.size() * sizeof(float)) == 0;
  wrong += !same;
  std::printf("%s %sy, streamed and together: the same bits\n", same ? "ok   " : "WRONG", name.c_str());
}

template <class T>
void check_selection(const std::string& rule_name, Normalise rule, int64_t groups, int64_t kept, const char* kind) {
  const std::string name =
      "topk." + rule_name + "." + std::to_string(groups) + "." + std::to_string(kept) + "." + kind + ".";
  const Array& array = get(name + "scores");
  const int64_t rows = 3, scores = int64_t(array.bytes.size() / sizeof(T)) / rows, entries = groups * kept;
  const TopK spec{scores, kept, groups, rule};
  std::vector<T> gates(rows * entries), scratch(top_k_scratch(spec)), grad(rows * scores, T(NAN));
  std::vector<int64_t> indices(rows * entries), runners(groups);
  for (int64_t t = 0; t < rows; ++t) {
    const T* row = array.as<T>() + t * scores;
    T* own = gates.data() + t * entries;
    typed<T>().select(spec, 0, groups, row, own, indices.data() + t * entries, scratch.data());
    typed<T>().normalise(spec, own);
    typed<T>().top_k_backward(spec, get(name + "grad_gates").as<T>() + t * entries, row,
                              get(name + "gates").as<T>() + t * entries,
                              get(name + "indices").as<int64_t>() + t * entries, grad.data() + t * scores,
                              runners.data(), scratch.data());
  }
  compare(name + "indices", indices, 0);
  compare(name + "gates", gates, TOLERANCE<T>);
  compare(name + "grad_scores", grad, TOLERANCE<T>);
}

template <class T>
void check_cell(Cell cell, const std::string& name) {
  const bool lstm = cell == Cell::lstm;
  const Array& array = get(name + "sums");
  const int64_t tokens = 3, size = int64_t(array.bytes.size() / sizeof(T)), units = size / tokens / (lstm ? 4 : 3);
  std::vector<T> activations(array.as<T>(), array.as<T>() + size), c(tokens * units), h(tokens * units);
  CellForward<T> step{};
  step.cell = cell;
  step.size = units;
  step.activations = activations.data();
  step.input = lstm ? nullptr : get(name + "input").as<T>();
  step.before = get(name + "before").as<T>();
  step.c = lstm ? c.data() : nullptr;
  step.h = h.data();
  for (int64_t t = 0; t < tokens; ++t) typed<T>().cell_forward(step, t, 0, units);
  if (lstm) compare(name + "c", c, TOLERANCE<T>);
  compare(name + "h", h, TOLERANCE<T>);
}

}  // namespace

int main(int count, char** words) {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s results.bin\n", words[0]);
    return 2;
  }
  read(words[1]);
  for (const char* grid : {"ragged", "thin", "many", "one"}) {
    check_linear<float>(std::string("linear.") + grid + ".f32.");
    check_linear<double>(std::string("linear.") + grid + ".f64.");
  }
  for (const char* grid : {"ragged", "one"})
    for (const FormatTraits& format : FORMATS) check_packed(grid, Format(&format - FORMATS));
  const std::pair<const char*, Normalise> rules[] = {{"mean", Normalise::mean},
                                                     {"rms", Normalise::rms},
                                                     {"none", Normalise::none},
                                                     {"margin", Normalise::margin},
                                                     {"margin_near_dense", Normalise::margin_near_dense}};
  for (const auto& [name, rule] : rules)
    for (const auto& [groups, kept] : {std::pair{1, 9}, std::pair{4, 3}}) {
      check_selection<float>(name, rule, groups, kept, "f32");
      check_selection<double>(name, rule, groups, kept, "f64");
    }
  check_cell<float>(Cell::lstm, "lstm.f32.");
  check_cell<double>(Cell::lstm, "lstm.f64.");
  check_cell<float>(Cell::gru, "gru.f32.");
  check_cell<double>(Cell::gru, "gru.f64.");
  std::printf("%s kernels: %d arrays compared, %d wrong\n", table.name, compared, wrong);
  return wrong == 0 ? 0 : 1;
}
