// Top-k over the rows of a batch: checks of its arguments and its cut into tasks.
#pragma once

#include "host/buffer.h"
#include "host/dispatch.h"
#include "host/parallel.h"

#include <torch/headeronly/util/Exception.h>

#include <string>

namespace blockgate {

inline Normalise normalise_of(const std::string& name) {
  if (name == "mean") return Normalise::mean;
  if (name == "rms") return Normalise::rms;
  if (name == "margin") return Normalise::margin;
  if (name == "margin_near_dense") return Normalise::margin_near_dense;
  STD_TORCH_CHECK(name == "none", "normalise: expected mean, rms, none, margin or margin_near_dense, got ",
                  name);
  return Normalise::none;
}

inline TopK top_k_spec(int64_t scores, int64_t open_blocks, int64_t groups, Normalise normalise) {
  STD_TORCH_CHECK(groups >= 1 && scores % groups == 0, "groups: expected a divisor of the ",
                  scores, " scores, got ", groups);
  STD_TORCH_CHECK(open_blocks >= 1 && open_blocks <= scores / groups,
                  "open_blocks: expected 1 to ", scores / groups, " (scores per group), got ",
                  open_blocks);
  return {scores, open_blocks, groups, normalise};
}

// Parts of equal size for row-wise work of about `scores` counted elements a row.
inline int64_t row_parts(int64_t rows, int64_t scores) {
  return larger(1, smaller(rows, threads_for(rows * scores * 32)));
}

template <class T>
void run_top_k(const TopK& spec, const T* scores, int64_t stride, int64_t rows, T* gates,
               int64_t* indices) {
  const int64_t kept = spec.groups * spec.open_blocks;
  const auto& kernel = typed_kernels<T>();
  const int64_t parts = row_parts(rows, spec.scores);
  run_tasks(parts, parts, [&](int64_t part) {
    const Buffer<T> scratch(top_k_scratch(spec));
    for (int64_t t = rows * part / parts; t < rows * (part + 1) / parts; ++t) {
      kernel.select(spec, 0, spec.groups, scores + t * stride, gates + t * kept, indices + t * kept,
                    scratch.get());
      kernel.normalise(spec, gates + t * kept);
    }
  });
}

}  // namespace blockgate
