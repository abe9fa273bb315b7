// Conversions and special functions that CUDA C++ has no direct name for.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

// Two half-precision numbers rounded to E4M3, as half-precision numbers again.
__device__ __forceinline__ __half2 round_to_e4m3(__half2 x) {
  uint32_t rounded;
  asm("{\n"
      ".reg .b16 e4m3;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 e4m3, %1;\n"
      "cvt.rn.f16x2.e4m3x2 %0, e4m3;\n"
      "}\n"
      : "=r"(rounded)
      : "r"(*reinterpret_cast<const uint32_t*>(&x)));
  return *reinterpret_cast<const __half2*>(&rounded);
}

// Two floats to BF16, the first in the low half; rounds to nearest even.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Two floats to half precision; rounds to nearest even, saturates at +-65504.
__device__ __forceinline__ __half2 to_half2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(low), "f"(high));
  return *reinterpret_cast<const __half2*>(&packed);
}

// Four half-precision numbers to four E4M3 bytes, as to_e4m3x4 of floats.
__device__ __forceinline__ uint32_t to_e4m3x4(__half2 low, __half2 high) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, %2;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "r"(*reinterpret_cast<const uint32_t*>(&low)), "r"(*reinterpret_cast<const uint32_t*>(&high)));
  return packed;
}

// The first four bits of two half-precision numbers, the rest cut off: what E4M3 holds of them in its range.
__device__ __forceinline__ __half2 first_four_bits(__half2 x) {
  constexpr uint32_t kSignExponentAndThreeBits = 0xFF80FF80;
  const uint32_t bits = *reinterpret_cast<const uint32_t*>(&x) & kSignExponentAndThreeBits;
  return *reinterpret_cast<const __half2*>(&bits);
}

// The largest power of two that is not larger than a positive normal x; 0 for 0.
__device__ __forceinline__ float power_of_two_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7F800000u); }

}  // namespace pw::ptx
