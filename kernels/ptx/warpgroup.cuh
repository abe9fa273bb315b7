// Warpgroups with different roles: barriers among some of the CTA's threads, and registers dealt out by role.
#pragma once
#include <cstdint>

namespace pw::ptx {

// Barrier number `id` (1 to 15; 0 is __syncthreads) of `threads` threads of the CTA.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Hands registers of this warpgroup back to the CTA's pool, or takes some from it; counts are multiples of 8. Taking waits until the
// pool has them: what all warpgroups hold in the end must not exceed what the launch gave.
template <int kRegisters>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace pw::ptx
