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

// Two floats to a pair of halves, the first in the lower one.
__device__ __forceinline__ uint32_t to_half2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
  return packed;
}

// Multiplies four E4M3 bytes by a factor (an FP16 pair of the same value); rounds to nearest even.
__device__ __forceinline__ uint32_t scale_e4m3x4(uint32_t x, uint32_t factor) {
  uint32_t y;
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 low2, high2;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 low2, low;\n"
      "cvt.rn.f16x2.e4m3x2 high2, high;\n"
      "mul.rn.f16x2 low2, low2, %2;\n"
      "mul.rn.f16x2 high2, high2, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, low2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, high2;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(y)
      : "r"(x), "r"(factor));
  return y;
}

}  // namespace pw::ptx
