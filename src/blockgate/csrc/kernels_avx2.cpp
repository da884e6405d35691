// Kernels for AVX2 with FMA: 16 registers of 8 floats.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// After all other headers: what is compiled from here on may only be called on such a machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,bmi,bmi2,f16c,popcnt")
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define BLOCKGATE_ISA avx2
#define BLOCKGATE_VECTOR_BYTES 32
#define BLOCKGATE_ACCUMULATORS 12
#define BLOCKGATE_X86 1
#include "kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace blockgate {
constinit const KernelTable avx2_kernels = avx2::make_table("avx2");
}

#endif
