// float16: IEEE half precision, rounded to nearest, ties to even.
#include "host/format.h"

#include <torch/headeronly/util/Half.h>

namespace blockgate {
namespace {

using torch::headeronly::Half;

void encode(const RowSize& size, const float* weight, void* to, float*) {
  auto* stored = static_cast<uint16_t*>(to);
  for (int64_t k = 0; k < size.length; ++k) stored[k * PANEL] = Half(weight[k]).x;
}

void decode(const RowSize& size, const void* from, const float*, float* weight) {
  const auto* stored = static_cast<const uint16_t*>(from);
  for (int64_t k = 0; k < size.length; ++k) weight[k] = Half(stored[k * PANEL], Half::from_bits());
}

}  // namespace

const HostFormat float16_format{torch::headeronly::ScalarType::Half, encode, decode};

}  // namespace blockgate
