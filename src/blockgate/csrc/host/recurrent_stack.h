// A stack of LSTM or GRU layers on prepared packed layers, for inference.
#pragma once

#include "host/prepared.h"

#include <vector>

namespace blockgate __attribute__((visibility("hidden"))) {

struct StackShape {
  Cell cell;
  int64_t steps, rows, size, layers;
  int64_t gates() const { return cell_gates(cell); }
};

// Input and recurrent product of each layer of the stack, one after the other, and how many blocks
// each opens.
struct RecurrentStack {
  std::vector<std::shared_ptr<const PreparedLayer>> products;
  std::vector<int64_t> open_blocks;
};

// States of the stack: h and c before (layers, rows, size), and after. A GRU has no c.
struct States {
  const float *h, *c;
  float *h_n, *c_n;
};

// One step of x (rows, in); the output is the last layer's h_n.
void run_single_step(const RecurrentStack& stack, const StackShape& shape, const float* x,
                     const States& states);

// All steps of x (steps, rows, in) to y (steps, rows, size).
void run_sequence(const RecurrentStack& stack, const StackShape& shape, const float* x,
                  const States& states, float* y);

}  // namespace blockgate
