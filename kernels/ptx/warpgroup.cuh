// Warpgroups with different roles: registers dealt out by role.
#pragma once
#include <cstdint>

namespace pw::ptx {

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
