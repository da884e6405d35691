// bfloat16: the upper half of a float32's bits, rounded to nearest, ties to even.
#include "host/format.h"

#include <cstring>

namespace blockgate {
namespace {

uint16_t to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // NaN stays NaN.
  if (value != value) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(uint16_t stored) {
  const uint32_t bits = uint32_t(stored) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void encode(const RowSize& size, const float* weight, void* to, float*) {
  auto* stored = static_cast<uint16_t*>(to);
  for (int64_t k = 0; k < size.length; ++k) stored[k * PANEL] = to_bfloat16(weight[k]);
}

void decode(const RowSize& size, const void* from, const float*, float* weight) {
  const auto* stored = static_cast<const uint16_t*>(from);
  for (int64_t k = 0; k < size.length; ++k) weight[k] = from_bfloat16(stored[k * PANEL]);
}

}  // namespace

const HostFormat bfloat16_format{torch::headeronly::ScalarType::BFloat16, encode, decode};

}  // namespace blockgate
