// Kernels for what every machine of the architecture has.
#include "kernels.h"

#pragma GCC diagnostic ignored "-Wpsabi"

#include "isa/vector_baseline.h"

#include "isa/kernel_set.h"

namespace blockgate {
static bool baseline_runs_here() { return true; }

constinit const KernelTable baseline_kernels = baseline::make_table("baseline", baseline_runs_here);
}
