// Open gates of a batch, grouped by block: a stable counting sort, so tokens stay ascending.
#pragma once

#include "host/buffer.h"
#include "kernels.h"
#include "host/parallel.h"

#include <torch/headeronly/util/Exception.h>

#include <cstring>

namespace blockgate {

template <class T>
struct GroupedGates {
  Buffer<int64_t> starts;
  Buffer<Entry<T>> entries;
  Groups<T> view() const { return {starts.get(), entries.get()}; }
};

// Calls visit(token, slot, block, gate) for the open gates of some tokens. Stops at an index
// outside the grid and returns its position, else -1.
template <class T, class Visit>
int64_t visit_open(const T* gates, const int64_t* indices, int64_t slots, int64_t num_blocks,
                   int64_t token_begin, int64_t token_end, const Visit& visit) {
  for (int64_t t = token_begin; t < token_end; ++t)
    for (int64_t s = 0; s < slots; ++s) {
      const int64_t block = indices[t * slots + s];
      if (uint64_t(block) >= uint64_t(num_blocks)) return t * slots + s;
      if (gates[t * slots + s] != T(0)) visit(t, s, block, gates[t * slots + s]);
    }
  return -1;
}

// Whether every token has a gate for every block, in order, and none is closed.
template <class T>
bool all_open(const T* gates, const int64_t* indices, int64_t tokens, int64_t slots,
              int64_t num_blocks) {
  if (slots != num_blocks) return false;
  std::atomic<bool> open{true};
  const int64_t parts = threads_for(tokens * slots * 2);
  run_tasks(parts, parts, [&](int64_t part) {
    for (int64_t t = tokens * part / parts; t < tokens * (part + 1) / parts; ++t) {
      bool every = true;
      for (int64_t s = 0; s < slots; ++s)
        every &= (indices[t * slots + s] == s) & (gates[t * slots + s] != T(0));
      if (!every) return open.store(false, std::memory_order_relaxed);
    }
  });
  return open.load();
}

// The groups then: nothing to sort.
template <class T>
GroupedGates<T> group_all(const T* gates, int64_t tokens, int64_t num_blocks) {
  GroupedGates<T> groups;
  groups.starts = Buffer<int64_t>(num_blocks + 1);
  groups.entries = Buffer<Entry<T>>(tokens * num_blocks);
  for (int64_t block = 0; block <= num_blocks; ++block) groups.starts[block] = block * tokens;
  // A few tokens at a time, so that gates are read in order and entries written in runs.
  constexpr int64_t RUN = 8;
  run_tasks(ceil_div(tokens, RUN), threads_for(tokens * num_blocks * 8), [&](int64_t run) {
    const int64_t first = run * RUN, last = smaller(first + RUN, tokens);
    for (int64_t block = 0; block < num_blocks; ++block) {
      Entry<T>* const entries = groups.entries.get() + block * tokens;
      for (int64_t t = first; t < last; ++t)
        entries[t] = {int32_t(t), int32_t(block), gates[t * num_blocks + block]};
    }
  });
  return groups;
}

// Sorts the open entries of gates, indices (tokens, slots); indices may come in any order.
template <class T>
GroupedGates<T> group_by_block(const T* gates, const int64_t* indices, int64_t tokens,
                               int64_t slots, int64_t num_blocks) {
  if (all_open(gates, indices, tokens, slots, num_blocks)) return group_all(gates, tokens, num_blocks);
  const int64_t parts = smaller(threads_for(tokens * slots * 16), larger(1, tokens));
  const auto part_begin = [&](int64_t part) { return tokens * part / parts; };
  // counts[part][block] becomes the place of the next entry of that part in that block.
  Buffer<int64_t> counts(parts * num_blocks);
  std::memset(counts.get(), 0, parts * num_blocks * sizeof(int64_t));
  std::atomic<int64_t> bad{-1};
  run_tasks(parts, parts, [&](int64_t part) {
    int64_t* count = counts.get() + part * num_blocks;
    const int64_t found = visit_open(
        gates, indices, slots, num_blocks, part_begin(part), part_begin(part + 1),
        [&](int64_t, int64_t, int64_t block, T) { ++count[block]; });
    if (found >= 0) bad.store(found, std::memory_order_relaxed);
  });
  const int64_t found = bad.load();
  STD_TORCH_CHECK(found < 0, "indices: expected block indices in [0, ", num_blocks, "), got ",
                  indices[found]);

  GroupedGates<T> groups;
  groups.starts = Buffer<int64_t>(num_blocks + 1);
  int64_t total = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    groups.starts[block] = total;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t count = counts[part * num_blocks + block];
      counts[part * num_blocks + block] = total;
      total += count;
    }
  }
  groups.starts[num_blocks] = total;
  groups.entries = Buffer<Entry<T>>(total);
  run_tasks(parts, parts, [&](int64_t part) {
    int64_t* place = counts.get() + part * num_blocks;
    Entry<T>* entries = groups.entries.get();
    visit_open(gates, indices, slots, num_blocks, part_begin(part), part_begin(part + 1),
               [&](int64_t token, int64_t slot, int64_t block, T gate) {
                 entries[place[block]++] = {int32_t(token), int32_t(slot), gate};
               });
  });
  return groups;
}

}  // namespace blockgate
