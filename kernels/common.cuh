// What the regroup and union-preparation kernels share: the packed batch, the search for the request that owns a
// window or a group, and the check of top-k page ids.
//
// The sources of this folder's regroup.cuh and union_prep.cuh hold no inline PTX, so that a C++ compiler without CUDA
// can build and run them too (tests/kernels/host/cuda_host_shim.h stands in for the CUDA runtime).
#pragma once

#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include "ptx/dependent_launch.cuh"
// The one static shared-memory object of a kernel, a kernel launch on a stream, and one that need not wait for the kernel before it.
#define PW_SHARED(Type, name) __shared__ Type name
#define PW_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#ifdef PW_BEFORE_SM90  // no such launch there
#define PW_LAUNCH_EARLY(kernel, grid, block, stream, ...) (PW_LAUNCH(kernel, grid, block, stream, __VA_ARGS__), cudaGetLastError())
#else
#define PW_LAUNCH_EARLY(kernel, grid, block, stream, ...) pw::ptx::launch_early(kernel, grid, block, 0, stream, __VA_ARGS__)
#endif
#else
#include "cuda_host_shim.h"  // defines the same macros
#endif

namespace pw {

// ---------------------------------------------------------------- Constants
constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kMaxTopk = 16;  // page ids of one query and KV head

// ---------------------------------------------------------------- Types
// Which slots of a group picked a page of its union: bit r is slot r. mask_dtype() in pageweaver_sglang/plan.py allocates them.
template <int kSlots>
using UnionMask = std::conditional_t<kSlots <= 8, uint8_t, int32_t>;

// A packed batch of prefill chunks, as SGLang passes it. Request r owns the token rows
// [cu_seqlens[r], cu_seqlens[r + 1]); rows in [cu_seqlens[requests], tokens) are padding.
struct Lengths {
  const int32_t* cu_seqlens;   // [requests + 1]
  const int32_t* prefix_lens;  // [requests] tokens that precede the chunk
  const int32_t* seq_lens;     // [requests], or null: prefix length + chunk length
  int requests;
  int tokens;  // rows of the buffers, padding included
};

// Where a unit of work (a window or a group) lies. `request == requests` means the padding rows, taken as one more
// request; `request < 0` a spare unit: the grid is sized without reading the lengths.
struct Location {
  int request;
  int begin;  // token rows of the request
  int end;
  int unit;  // number of the unit inside the request
};

// A divisor that is known when the kernel is launched: n / value for 0 <= n < 2^31 as one multiplication and a shift.
//
// With 2^s the least power of two not below value, scale = ceil(2^(31 + s) / value) fits 32 bits, and scale * value
// exceeds 2^(31 + s) by less than value <= 2^s. So n * scale / 2^(31 + s) exceeds n / value by less than 1 / value.
struct Divisor {
  uint32_t value, scale;
  int shift;

  Divisor() = default;
  explicit Divisor(int divisor) : value(static_cast<uint32_t>(divisor)), shift(31) {
    while ((uint64_t{1} << (shift - 31)) < value) ++shift;
    scale = static_cast<uint32_t>(((uint64_t{1} << shift) + value - 1) / value);
  }
  __device__ int divide(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * scale >> shift);
  }
  __device__ int ceil_divide(int n) const { return n > 0 ? divide(n - 1) + 1 : 0; }
};

// ---------------------------------------------------------------- Functions
__host__ __device__ constexpr int ceil_div(int a, int b) { return a > 0 ? (a - 1) / b + 1 : 0; }

// Programmatic dependent launch: waits for the kernel before this one; lets the next one start. Before compute capability
// 9.0 (PW_BEFORE_SM90) one kernel simply follows another.
__device__ inline void wait_for_previous_kernel() {
#ifndef PW_BEFORE_SM90
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_kernel_start() {
#ifndef PW_BEFORE_SM90
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A row that cu_seqlens names, kept inside the buffers whatever it holds.
__device__ inline int row_inside(const Lengths& lengths, int row) { return min(max(row, 0), lengths.tokens); }

// Finds unit number `target` of the batch, where a request of `n` rows has `units_of(n)` units. Called by a whole
// warp; 32 requests are looked at per round, and only the round that holds the target is scanned.
template <class UnitsOf>
__device__ inline Location locate(const Lengths& lengths, int target, UnitsOf units_of) {
  const int lane = threadIdx.x % kWarpSize;
  for (int base = 0; base <= lengths.requests; base += kWarpSize) {
    const int r = base + lane;
    // Both reads are under way before the first result is used.
    const int first = lengths.cu_seqlens[min(r, lengths.requests)];
    const int last = lengths.cu_seqlens[min(r + 1, lengths.requests)];
    const int begin = row_inside(lengths, first);
    const int end = r < lengths.requests ? row_inside(lengths, last) : (r > lengths.requests ? 0 : lengths.tokens);
    const int units = end > begin ? units_of(end - begin) : 0;
    const int total = __reduce_add_sync(kFullWarp, units);
    if (target >= total) {
      target -= total;
      continue;
    }
    int inclusive = units;
    for (int d = 1; d < kWarpSize; d *= 2) {
      const int below = __shfl_up_sync(kFullWarp, inclusive, d);
      if (lane >= d) inclusive += below;
    }
    const int source = __ffs(__ballot_sync(kFullWarp, target < inclusive)) - 1;
    return {base + source, __shfl_sync(kFullWarp, begin, source), __shfl_sync(kFullWarp, end, source),
            target - __shfl_sync(kFullWarp, inclusive - units, source)};
  }
  return {-1, 0, 0, 0};
}

// Tokens of the request's whole sequence (prefix and chunk).
__device__ inline int sequence_length(const Lengths& lengths, const Location& at) {
  return lengths.seq_lens != nullptr ? lengths.seq_lens[at.request]
                                     : lengths.prefix_lens[at.request] + (at.end - at.begin);
}

// True when top-k rows can be read as 16-byte vectors of four ids.
inline bool rows_are_vectors(const int32_t* topk, int64_t head_stride, int64_t row_stride, int k) {
  return k % 4 == 0 && reinterpret_cast<uintptr_t>(topk) % 16 == 0 && head_stride % 4 == 0 && row_stride % 4 == 0;
}

// kCount ids of a top-k row from position `first` on; positions past k become -1. All reads are under way before the
// first id is needed.
template <int kCount>
__device__ inline void load_ids(const int32_t* row, int first, int k, bool vectors, int (&ids)[kCount]) {
  static_assert(kCount % 4 == 0, "whole vectors");
  if (vectors) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const int4 four = first + i < k ? __ldg(reinterpret_cast<const int4*>(row + first + i)) : int4{-1, -1, -1, -1};
      ids[i] = four.x, ids[i + 1] = four.y, ids[i + 2] = four.z, ids[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) ids[i] = first + i < k ? __ldg(row + first + i) : -1;
  }
}

// Ids outside [0, pages) become -1.
template <int kCount>
__device__ inline void drop_invalid(int pages, int (&ids)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (ids[i] < 0 || ids[i] >= pages) ids[i] = -1;
}

}  // namespace pw
