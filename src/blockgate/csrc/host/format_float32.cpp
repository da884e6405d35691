// float32: every bit is kept.
#include "host/format.h"

namespace blockgate {
namespace {

void encode(const RowSize& size, const float* weight, void* to, float*) {
  auto* stored = static_cast<float*>(to);
  for (int64_t k = 0; k < size.length; ++k) stored[k * PANEL] = weight[k];
}

void decode(const RowSize& size, const void* from, const float*, float* weight) {
  const auto* stored = static_cast<const float*>(from);
  for (int64_t k = 0; k < size.length; ++k) weight[k] = stored[k * PANEL];
}

}  // namespace

const HostFormat float32_format{torch::headeronly::ScalarType::Float, encode, decode};

}  // namespace blockgate
