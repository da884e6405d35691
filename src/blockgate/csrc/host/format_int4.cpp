// int4: whole multiples from -8 to 7 of a scale, one for each group of inputs; two inputs a byte.
#include "host/format.h"

#include <cmath>

namespace blockgate {
namespace {

constexpr int64_t GROUP = traits_of(Format::int4).group;
// What the weight of largest magnitude is divided by, in the order of formats/int4.py.
constexpr float DIVISORS[] = {-8.0f, -8.25f, -8.5f, -7.75f, -7.5f, -7.25f, 7.0f};

float integer_of(float weight, float scale) {
  const float steps = std::nearbyint(weight / (scale == 0 ? 1 : scale));
  return std::fmin(7.0f, std::fmax(-8.0f, steps));
}

// The scale that leaves the least sum of squared errors. A difference is rounded to float, and its
// square is then exact: the sum has the same bits as the reference's, fused or not. A scale that
// turns a huge weight to inf has an infinite error.
float best_scale(const float* weight, int64_t length) {
  float extreme = 0;
  for (int64_t k = 0; k < length; ++k)
    if (std::fabs(weight[k]) > std::fabs(extreme)) extreme = weight[k];
  float best = extreme / DIVISORS[0];
  double least = INFINITY;
  for (const float divisor : DIVISORS) {
    const float scale = extreme / divisor;
    double total = 0;
    for (int64_t k = 0; k < length; ++k) {
      const float stored = float(double(integer_of(weight[k], scale)) * scale);
      const float difference = float(double(weight[k]) - stored);
      total += double(difference) * difference;
    }
    if (total < least) {
      least = total;
      best = scale;
    }
  }
  return best;
}

void encode(const RowSize& size, const float* weight, void* to, float* scale) {
  auto* stored = static_cast<uint8_t*>(to);
  for (int64_t first = 0; first < size.length; first += GROUP, scale += size.scale_stride) {
    const int64_t end = smaller(first + GROUP, size.length);
    *scale = best_scale(weight + first, end - first);
    for (int64_t k = first; k < end; ++k) {
      const auto half = uint8_t(int(integer_of(weight[k], *scale)) & 15);
      stored[k / 2 * PANEL] |= uint8_t(half << 4 * (k % 2));
    }
  }
}

void decode(const RowSize& size, const void* from, const float* scale, float* weight) {
  const auto* stored = static_cast<const uint8_t*>(from);
  for (int64_t k = 0; k < size.length; ++k) {
    const int half = stored[k / 2 * PANEL] >> 4 * (k % 2) & 15;
    weight[k] = float(half > 7 ? half - 16 : half) * scale[k / GROUP * size.scale_stride];
  }
}

}  // namespace

const HostFormat int4_format{torch::headeronly::ScalarType::Byte, encode, decode};

}  // namespace blockgate
