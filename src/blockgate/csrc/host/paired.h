// MLPs whose matrices share one gate over hidden channels.
#pragma once

#include "host/prepared.h"

#include <string>

namespace blockgate __attribute__((visibility("hidden"))) {

Activation activation_of(const std::string& name);

// `up` has the gate and one column of blocks, `gate_proj` (null for none) the same grid, and `down` one row of
// blocks, with the same numbers.
struct PairedLayers {
  const PreparedLayer& up;
  const PreparedLayer& down;
  const PreparedLayer* gate_proj;
  Activation activation;
};

// Raises unless the grids fit one another and only `up` has a gate.
void check_paired(const PairedLayers& layers);

// Rows of x, `stride` apart, to y (tokens, out).
void run_paired(const PairedLayers& layers, const float* x, int64_t stride, int64_t tokens,
                int64_t open_blocks, float* y);

}  // namespace blockgate
