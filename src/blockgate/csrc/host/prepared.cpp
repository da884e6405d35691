#include "host/prepared.h"
#include "host/select.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace blockgate {
namespace {

void run_gate_layer(const GateLayer& layer, const float* x, int64_t stride, int64_t tokens,
                    float* y) {
  run_packed_dense(layer.weight, layer.grid, x, stride, tokens, layer.bias.data(), y);
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

void run_layer(const PreparedLayer& layer, const float* x, int64_t stride, int64_t tokens,
               int64_t open_blocks, float* y) {
  const Grid& grid = layer.grid;
  if (!layer.gate)
    return run_packed_dense(layer.weight, grid, x, stride, tokens, layer.bias.data(), y);
  const PreparedGate& gate = *layer.gate;
  const int64_t num_blocks = grid.rows * grid.cols;
  const TopK spec = top_k_spec(num_blocks, open_blocks, gate.groups, gate.normalise);
  const int64_t kept = gate.groups * open_blocks;
  if (tokens == 0) return;

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
  Buffer<float> gates(tokens * kept);
  Buffer<int64_t> indices(tokens * kept);
  run_top_k<float>(spec, scores.get(), num_blocks, tokens, gates.get(), indices.get());
  run_packed(layer.weight, grid, x, stride, tokens, layer.bias.data(), gates.get(), indices.get(),
             kept, y);
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
