// wgmma: warpgroup matrix multiply of E4M3 (steps of 32 along k) or BF16 operands (16), FP32 accumulators.
//
// Operands in shared memory are K-major tiles of 128-byte rows with the 128-byte swizzle (what a TMA box of 128 bytes with
// CU_TENSOR_MAP_SWIZZLE_128B writes): 16-byte chunk c of row r lies at chunk c ^ (r & 7). A step along k is 32 bytes. BF16 rows of 128 dims are
// two such tiles, panels of 64 dims; V goes in as it lies in the cache, [k][n], which only 16-bit types can.
//
// Accumulator layout, thread t of a warp, g = t / 4, q = t % 4: d[4j], d[4j+1] are row g, columns 8j + 2q, 8j + 2q + 1;
// d[4j+2], d[4j+3] the same columns of row g + 8. Warp w holds rows 16w to 16w + 15.
#pragma once
#include <cstdint>

#include "mbarrier.cuh"

namespace pw::ptx {

constexpr int kAccumulators = 64;  // registers per thread of a 64 x 128 FP32 tile

// Matrix descriptor of a K-major tile at a 1024-byte aligned address: 8-row blocks 1024 bytes apart, 128-byte swizzle.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128B = 1ull << 62;
  constexpr uint64_t kStrideBetweenRowBlocks = (1024ull >> 4) << 32;
  constexpr uint64_t kLeadingUnused = 1ull << 16;
  return kSwizzle128B | kStrideBetweenRowBlocks | kLeadingUnused | ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Of an [k][n] operand, panels of 64 columns `kPanelBytes` apart: rows of 128 bytes, 8-row blocks 1024 bytes apart along k.
template <uint32_t kPanelBytes>
__device__ __forceinline__ uint64_t wgmma_descriptor_n_major(const void* tile) {
  constexpr uint64_t kSwizzle128B = 1ull << 62;
  constexpr uint64_t kStrideBetweenRowBlocks = (1024ull >> 4) << 32;
  constexpr uint64_t kStrideBetweenPanels = static_cast<uint64_t>(kPanelBytes >> 4) << 16;
  return kSwizzle128B | kStrideBetweenRowBlocks | kStrideBetweenPanels | ((shared_address(tile) & 0x3FFFF) >> 4);
}

// Descriptors count in 16-byte units: the next step of a K-major row is 32 bytes on.
constexpr uint64_t kDescriptorStep = 32 >> 4;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving ordinary uses of accumulators across the fence or the wait beside it.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of kSome of them, from d[kFirst] on.
template <int kFirst, int kSome, int kCount>
__device__ __forceinline__ void pin_some_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = kFirst; i < kFirst + kSome; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The same for A fragments: they must be complete before the first wgmma of a batch is issued, or ptxas serialises it (C7513).
template <int kTerms, int kSteps>
__device__ __forceinline__ void pin_registers(uint32_t (&a)[kTerms][kSteps][4]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[term][i / 4][i % 4])::"memory");
}

#define PW_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PW_F16(d, i) PW_F4(d, i), PW_F4(d, i + 4), PW_F4(d, i + 8), PW_F4(d, i + 12)
#define PW_F64(d) PW_F16(d, 0), PW_F16(d, 16), PW_F16(d, 32), PW_F16(d, 48)
#define PW_D32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PW_D64 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// d = a * b (kAccumulate false) or d + a * b; both operands in shared memory.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n128k32_ss(float (&d)[kAccumulators], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " PW_D64 ", %64, %65, accumulate, 1, 1;\n}\n"
      : PW_F64(d)
      : "l"(a), "l"(b), "n"(static_cast<int>(kAccumulate)));
}

// The same for 64 columns, whose accumulators are d[kFirst] to d[kFirst + 31].
template <bool kAccumulate, int kFirst>
__device__ __forceinline__ void wgmma_m64n64k32_ss(float (&d)[kAccumulators], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " PW_D32 ", %32, %33, accumulate, 1, 1;\n}\n"
      : PW_F16(d, kFirst), PW_F16(d, kFirst + 16)
      : "l"(a), "l"(b), "n"(static_cast<int>(kAccumulate)));
}

// d += a * b; a is this thread's 16 bytes of the 64 x 32 tile: a[0], a[1]: rows g, g + 8, k = 4q to 4q + 3;
// a[2], a[3]: the same rows, k = 16 + 4q to 16 + 4q + 3.
__device__ __forceinline__ void wgmma_m64n128k32_rs(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " PW_D64 ", {%64, %65, %66, %67}, %68, 1, 1, 1;\n"
               : PW_F64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The same, or with kAccumulate false d = a * b, for 64 columns, whose accumulators are d[kFirst] to d[kFirst + 31].
template <bool kAccumulate, int kFirst>
__device__ __forceinline__ void wgmma_m64n64k32_rs(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " PW_D32 ", {%32, %33, %34, %35}, %36, %37, 1, 1;\n"
               : PW_F16(d, kFirst), PW_F16(d, kFirst + 16)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kAccumulate)));
}

// BF16: d = a * b, or d + a * b, 64 columns; both operands K-major in shared memory.
template <bool kAccumulate>
__device__ __forceinline__ void wgmma_m64n64k16_ss(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " PW_D32 ", %32, %33, accumulate, 1, 1, 0, 0;\n}\n"
      : PW_F16(d, 0), PW_F16(d, 16)
      : "l"(a), "l"(b), "n"(static_cast<int>(kAccumulate)));
}

// BF16: d += a * b with b [k][n] in shared memory; a is this thread's 16 bytes of the 64 x 16 tile: a[0], a[1]: rows g, g + 8,
// k = 2q, 2q + 1; a[2], a[3]: the same rows, k = 8 + 2q, 9 + 2q.
__device__ __forceinline__ void wgmma_m64n128k16_rs(float (&d)[kAccumulators], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " PW_D64 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               : PW_F64(d)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef PW_F4
#undef PW_F16
#undef PW_F64
#undef PW_D32
#undef PW_D64

}  // namespace pw::ptx
