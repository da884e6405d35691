// Groups of integers at the op boundary: each is read once into a struct, or refused with a reason.
#pragma once

#include "host/tensors.h"

#include <vector>

namespace blockgate __attribute__((visibility("hidden"))) {

using Integers = std::vector<int64_t>;

inline void check_count(const Integers& group, const char* name, const char* meaning,
                        size_t expected) {
  STD_TORCH_CHECK(group.size() == expected, name, ": expected ", expected, " integers ", meaning,
                  ", got ", group.size());
}

struct BlockSize {
  int64_t out, in;
};

inline BlockSize block_of(const Integers& block) {
  check_count(block, "block", "(out, in)", 2);
  return {block[0], block[1]};
}

inline Grid grid_of(const Integers& grid) {
  check_count(grid, "grid", "(out_features, in_features, block_out, block_in)", 4);
  return make_grid(grid[0], grid[1], grid[2], grid[3]);
}

// The part of the input that a gate reads.
struct Key {
  int64_t offset, size;
};

// `inputs` is what a key is taken from, `features` its name.
inline Key key_of(const Integers& key, int64_t inputs, const char* features) {
  check_count(key, "key", "(offset, size)", 2);
  STD_TORCH_CHECK(key[0] >= 0 && key[1] > 0 && key[1] <= inputs && key[0] <= inputs - key[1],
                  "key: expected a part of the ", inputs, " ", features, ", got ", key[1],
                  " from ", key[0], " on");
  return {key[0], key[1]};
}

struct Selection {
  int64_t open_blocks, groups;
};

inline Selection selection_of(const Integers& selection) {
  check_count(selection, "selection", "(open_blocks, groups)", 2);
  return {selection[0], selection[1]};
}

}  // namespace blockgate
