// Kernels for what every machine of the architecture has: SSE2 on x86-64, NEON on ARM64.
#include "kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#pragma GCC diagnostic ignored "-Wpsabi"

#define BLOCKGATE_ISA baseline
#define BLOCKGATE_VECTOR_BYTES 16
#if defined(__SSE2__)
#define BLOCKGATE_X86 1
#endif
#if defined(__aarch64__)
#define BLOCKGATE_ACCUMULATORS 24
#else
#define BLOCKGATE_ACCUMULATORS 12
#endif
#include "kernel_set.h"

namespace blockgate {
constinit const KernelTable baseline_kernels = baseline::make_table("baseline");
}
