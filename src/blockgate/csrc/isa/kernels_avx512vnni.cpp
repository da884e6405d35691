// Kernels for AVX-512 (F, BW, DQ, VL) with VNNI.
#include "kernels.h"

#if defined(__x86_64__)

#include <immintrin.h>

namespace blockgate {
// Before the target is named: this runs on any machine.
static bool avx512vnni_runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("avx512vnni");
}
}  // namespace blockgate

// After all other headers: what is compiled from here on may only be called on such a machine.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,bmi,bmi2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,bmi,bmi2,f16c,popcnt")
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define BLOCKGATE_ISA avx512vnni
#define BLOCKGATE_VNNI
#include "isa/vector_avx512.h"

#include "isa/kernel_set.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif

namespace blockgate {
constinit const KernelTable avx512vnni_kernels =
    avx512vnni::make_table("avx512vnni", avx512vnni_runs_here);
}

#endif
