// Kernels for AVX-512 (F, BW, DQ, VL): 32 registers of 16 floats.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

// After all other headers: what is compiled from here on may only be called on such a machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi,bmi2,f16c,popcnt")
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define BLOCKGATE_ISA avx512
#define BLOCKGATE_VECTOR_BYTES 64
#define BLOCKGATE_ACCUMULATORS 24
#define BLOCKGATE_X86 1
#include "kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace blockgate {
constinit const KernelTable avx512_kernels = avx512::make_table("avx512");
}

#endif
