// Chooses the kernel table once, by what the machine can do and what BLOCKGATE_ISA allows.
#include "host/dispatch.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <string>

namespace blockgate {
namespace {

const KernelTable& choose() {
  const KernelTable* const best_first[] = {
#if defined(__x86_64__)
      &avx512vnni_kernels, &avx512_kernels, &avx2_kernels,
#endif
      &baseline_kernels};
  const char* wanted = std::getenv("BLOCKGATE_ISA");
  std::string usable;
  for (const KernelTable* table : best_first) {
    if (!table->runs_here()) continue;
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
