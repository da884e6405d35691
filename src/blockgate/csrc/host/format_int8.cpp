// int8: whole multiples of a scale, one for each output of a block; the largest weight becomes 127.
#include "host/format.h"

#include <cmath>

namespace blockgate {
namespace {

// scale = max|w| / 127; stored = round to nearest even of w / scale.
void encode(const RowSize& size, const float* weight, void* to, float* scale) {
  auto* stored = static_cast<int8_t*>(to);
  float largest = 0;
  for (int64_t k = 0; k < size.length; ++k) largest = std::fmax(largest, std::fabs(weight[k]));
  *scale = largest / 127;
  if (*scale == 0) return;
  for (int64_t k = 0; k < size.length; ++k) {
    const float steps = std::nearbyint(weight[k] / *scale);
    stored[k / 2 * 2 * PANEL + k % 2] = int8_t(std::fmin(127.0f, std::fmax(-127.0f, steps)));
  }
}

void decode(const RowSize& size, const void* from, const float* scale, float* weight) {
  const auto* stored = static_cast<const int8_t*>(from);
  for (int64_t k = 0; k < size.length; ++k) weight[k] = stored[k / 2 * 2 * PANEL + k % 2] * *scale;
}

}  // namespace

const HostFormat int8_format{torch::headeronly::ScalarType::Char, encode, decode};
// Differs in how inputs are rounded, not in what is stored.
const HostFormat int8a8_format{torch::headeronly::ScalarType::Char, encode, decode};

}  // namespace blockgate
