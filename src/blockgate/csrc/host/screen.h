// Screened output layers: the exact top k of a layer's scores, of which most are never computed.
#pragma once

#include "host/tensors.h"

namespace blockgate __attribute__((visibility("hidden"))) {

// Checked tensors of a layer; see ScreenRows for those of the scan.
struct ScreenedLayer {
  Tensor weight_tensor, codes_tensor, steps_tensor, rows_tensor;
  std::optional<Tensor> bias_tensor;
  int64_t count, depth;  // rows and inputs

  int64_t panels() const { return ceil_div(count, PANEL); }
  int64_t groups() const { return ceil_div(depth, SCREEN_GROUP); }
};

ScreenedLayer screened_layer_of(const Tensor& weight, const std::optional<Tensor>& bias,
                                const Tensor& codes, const Tensor& steps, const Tensor& rows);

// Raises unless the layer has k rows. Call it before memory for k results is made.
void check_top_k(const ScreenedLayer& layer, int64_t k);

// The k largest scores of one token and their rows, by falling score, equals by rising row. Returns how
// many exact scores it took. NaN or inf among the inputs: NaN scores, rows 0 to k - 1.
int64_t screened_top_k(const ScreenedLayer& layer, const float* x, int64_t k, float* scores,
                       int64_t* rows);

// How many rows come before `target` in that order; `count` where the inputs have NaN or inf.
int64_t screened_rank(const ScreenedLayer& layer, const float* x, int64_t target);

}  // namespace blockgate
