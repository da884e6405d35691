// Chooses the kernel table once, by what the machine can do and what BLOCKGATE_ISA allows.
#include "dispatch.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>

namespace blockgate {
namespace {

bool machine_runs(const KernelTable& table) {
#if defined(__x86_64__)
  if (&table == &avx512_kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           machine_runs(avx2_kernels);
  if (&table == &avx2_kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
#endif
  return &table == &baseline_kernels;
}

const KernelTable& choose() {
  const KernelTable* const best_first[] = {
#if defined(__x86_64__)
      &avx512_kernels, &avx2_kernels,
#endif
      &baseline_kernels};
  const char* wanted = std::getenv("BLOCKGATE_ISA");
  std::string usable;
  for (const KernelTable* table : best_first) {
    if (!machine_runs(*table)) continue;
    if (!wanted || !*wanted || std::string(wanted) == table->name) return *table;
    usable += usable.empty() ? table->name : std::string(", ") + table->name;
  }
  STD_TORCH_CHECK(false, "BLOCKGATE_ISA: expected one of ", usable, " on this machine, got ",
                  wanted, "; unset it to use the best one");
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& chosen = choose();
  return chosen;
}

}  // namespace blockgate
