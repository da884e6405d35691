#include "host/layer_step.h"

#include <bit>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace blockgate {
namespace {

void run_gate_layer(const GateLayer& layer, const float* x, int64_t stride, int64_t tokens,
                    float* y) {
  run_packed_dense(layer.weight, layer.grid, x, stride, tokens, layer.bias.data(), y);
}

// A single token: everything in one parallel region, and all open blocks are known before the first
// is read, so that each thread fetches ahead from one row of blocks into its next one.
void run_token(const PreparedLayer& layer, const float* x, int64_t open_blocks, float* y) {
  const Grid& grid = layer.grid;
  const LayerStep prepared(layer, 1, open_blocks, y);
  const GatedStep<float> step = prepared.at(x);
  const StepCut cut{threads_for(prepared.work())};
  const int64_t parts = cut.panel_parts(grid, layer.weight.format, grid.rows), panels = packed_panels(grid);
  const float* bias = prepared.bias();
  const auto first_panel = [&](int64_t task) { return panels * (task % parts) / parts; };
  run_team(cut.threads, [&](TeamMember member) {
    const StepScratch<float> scratch = step_scratch(&step, 1);
    run_gates(member, cut, &step, 1, scratch.gate.get(), 0, [](int64_t) {});
    bool begun = false;
    member.phase_ahead(grid.rows * parts, [&](int64_t task, int64_t next) {
      const int64_t row = task / parts, begin = first_panel(task);
      const int64_t end = panels * (task % parts + 1) / parts;
      const int64_t output = row * grid.block_out + begin * PANEL;
      const int64_t width = smaller(end * PANEL, outputs_of_row(grid, row)) - begin * PANEL;
      if (width <= 0) return;
      if (bias) std::memcpy(y + output, bias + output, width * sizeof(float));
      else std::memset(y + output, 0, width * sizeof(float));
      const void* then = nullptr;
      if (next < grid.rows * parts)
        then = first_weights(step.product, next / parts, first_panel(next));
      product_task(step, row, begin, end, then, scratch.product.get(), begun);
      begun = then != nullptr;
    });
  });
}

void run_layer_by(Regime regime, const PreparedLayer& layer, const float* x, int64_t stride,
                  int64_t tokens, int64_t open_blocks, float* y) {
  const Grid& grid = layer.grid;
  if (!layer.gate)
    return run_packed_dense(layer.weight, grid, x, stride, tokens, layer.bias.data(), y, regime);
  if (tokens == 1) return run_token(layer, x, open_blocks, y);
  const OpenGates open = gates_of(layer, x, stride, tokens, open_blocks);
  run_packed(layer.weight, grid, x, stride, tokens, layer.bias.data(), open.values.get(),
             open.indices.get(), open.slots, y, regime);
}

// The same for all numbers of tokens that share a choice.
Choice::Ways layer_ways(const PreparedLayer& layer, int64_t tokens, int64_t open_blocks) {
  // Beyond, tokens that share each block are faster in any case.
  constexpr int64_t MOST_STREAMED = 15;
  const Grid& grid = layer.grid;
  const int64_t most = 2 * int64_t(std::bit_floor(uint64_t(tokens))) - 1;
  const int64_t open = layer.gate ? layer.gate->groups * open_blocks : grid.rows * grid.cols;
  const bool many = threads_for(most * open * packed_block_size(grid)) > 1;
  Choice::Ways ways;
  const auto add = [&](Regime regime) {
    if (many) ways.add({thread_count(), int(regime)});
    ways.add({1, int(regime)});
  };
  add(Regime::grouped);
  if (most > 1 && most <= MOST_STREAMED) add(Regime::streamed);
  return ways;
}

// Never destroyed, since Python may release layers until the very end.
struct Table {
  std::shared_mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<const PreparedLayer>> layers;
  int64_t next = 1;
};

Table& table() {
  static Table* const instance = new Table;
  return *instance;
}

}  // namespace

OpenGates gates_of(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
                   int64_t open_blocks) {
  const PreparedGate& gate = *layer.gate;
  const int64_t num_blocks = layer.grid.rows * layer.grid.cols;
  const TopK spec = top_k_spec(num_blocks, open_blocks, gate.groups, gate.normalise);
  OpenGates open{gate.groups * open_blocks};

  const float* key = x + gate.key_offset;
  int64_t key_stride = stride;
  Buffer<float> hidden;
  if (gate.hidden) {
    const int64_t width = gate.hidden->grid.out;
    hidden = Buffer<float>(tokens * width);
    run_gate_layer(*gate.hidden, key, key_stride, tokens, hidden.get());
    for (int64_t i = 0; i < tokens * width; ++i) hidden[i] = hidden[i] <= 0 ? 0 : hidden[i];
    key = hidden.get();
    key_stride = width;
  }
  Buffer<float> scores(tokens * num_blocks);
  run_gate_layer(gate.scores, key, key_stride, tokens, scores.get());
  open.values = Buffer<float>(tokens * open.slots);
  open.indices = Buffer<int64_t>(tokens * open.slots);
  run_top_k<float>(spec, scores.get(), num_blocks, tokens, open.values.get(), open.indices.get());
  return open;
}

void run_layer(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
               int64_t open_blocks, float* y) {
  if (tokens == 0) return;
  const Choice::Ways ways = layer_ways(layer, tokens, open_blocks);
  const auto run = [&](Choice::Way way) {
    const ThreadLimit limit(way.threads);
    run_layer_by(Regime(way.kind), layer, x, stride, tokens, open_blocks, y);
  };
  if (ways.count == 1) return run(ways.of[0]);
  layer.choices->layer[tokens].run(ways, double(tokens), run);
}

int64_t add_prepared(PreparedLayer layer) {
  // As when they were packed: since then they may have been copied or loaded.
  use_huge_pages(layer.weight.blocks_tensor);
  auto shared = std::make_shared<const PreparedLayer>(std::move(layer));
  const std::unique_lock lock(table().mutex);
  table().layers.emplace(table().next, std::move(shared));
  return table().next++;
}

std::shared_ptr<const PreparedLayer> find_prepared(int64_t handle) {
  const std::shared_lock lock(table().mutex);
  const auto found = table().layers.find(handle);
  STD_TORCH_CHECK(found != table().layers.end(), "handle: expected a prepared layer, got ", handle);
  return found->second;
}

void remove_prepared(int64_t handle) {
  std::shared_ptr<const PreparedLayer> last;  // freed after the lock
  const std::unique_lock lock(table().mutex);
  const auto found = table().layers.find(handle);
  if (found == table().layers.end()) return;
  last = std::move(found->second);
  table().layers.erase(found);
}

}  // namespace blockgate
