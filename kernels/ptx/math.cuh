// Conversions and special functions that CUDA C++ has no direct name for.
#pragma once
#include <cstdint>

namespace pw::ptx {

// 2^x with denormal results flushed to zero; 2^-1e30 is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four floats to four E4M3 bytes, first argument in the lowest byte; rounds to nearest even, saturates at +-448.
__device__ __forceinline__ uint32_t to_e4m3x4(float b0, float b1, float b2, float b3) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(b0), "f"(b1), "f"(b2), "f"(b3));
  return packed;
}

}  // namespace pw::ptx
