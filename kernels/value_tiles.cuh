// Value tiles: the pages of V that a call attends to, transposed once, before attention.
//
// FP8 wgmma wants both operands K-major, and for P V that is V^T, while the cache holds [token, dim]. The same page is visited by
// some 180 groups of a 64K chunk (ctx64k_a): transposing it once and copying the tile into the ring takes the work out of the
// attention kernel altogether. Only pages that the union preparation marked are transposed, so the cost follows the pages picked,
// not the context.
//
//   marks  [kv_heads, pool pages]  tokens of the page that belong to some request (1 to 128); 0: nobody picked it. Set by
//                                  union_prep.cuh, cleared here.
//   tiles  [kv_heads, pool pages]  16 KiB each: V^T in the token order of the P fragments, as it lies in shared memory under
//                                  the 128-byte swizzle: a plain bulk copy brings it
//
// One CTA of four warps per page at a time:
//   global -> registers -> shared [token, dim] -> transpose_v -> shared [dim', token'] -> global
#pragma once

#include "attention.cuh"

namespace pw {

struct ValueTileShared {
  alignas(1024) uint8_t v[RowTile::kTileBytes];
  alignas(1024) uint8_t vt[RowTile::kTileBytes];
};

struct ValueTileParams {
  const uint8_t* v;  // [slots, kv_heads, 128] E4M3
  int64_t slot_stride, head_stride;
  int32_t* marks;
  uint8_t* tiles;
  int pool_pages;
};

// E4M3 NaN (0x7F, 0xFF) -> 0 in four bytes. Behind the end of every request a page may hold anything, and a probability of zero
// does not undo a NaN.
__device__ __forceinline__ uint32_t without_nan(uint32_t x) {
  const uint32_t nan = ((x & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  return x & ~((nan >> 7) * 0xFFu);
}

__global__ void __launch_bounds__(RowTile::kThreads) value_tile_kernel(const __grid_constant__ ValueTileParams p) {
  __shared__ ValueTileShared shared;
  constexpr int kChunks = RowTile::kHeadDim / 16;
  constexpr int kRowsPerStep = RowTile::kThreads / kChunks;
  constexpr int kSteps = RowTile::kPageSize / kRowsPerStep;
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, chunk = t % kChunks, first_row = t / kChunks;
  const int64_t head = blockIdx.y;
  int32_t* marks = p.marks + head * p.pool_pages;

#pragma unroll 1
  for (int base = blockIdx.x; base < p.pool_pages; base += gridDim.x * RowTile::kThreads) {
    // Each thread looks at one page; pages of one CTA are gridDim.x apart, so that neighbours go to different SMs.
    const int64_t own = base + static_cast<int64_t>(t) * gridDim.x;
    const int own_mark = own < p.pool_pages ? marks[own] : 0;
    if (__syncthreads_or(own_mark) == 0) continue;
#pragma unroll 1
    for (int i = 0; i < RowTile::kThreads && base + static_cast<int64_t>(i) * gridDim.x < p.pool_pages; ++i) {
      const int64_t page = base + static_cast<int64_t>(i) * gridDim.x;
      const int tokens = __syncthreads_or(t == i ? own_mark : 0);  // also: the last tile has left shared memory
      if (tokens == 0) continue;
      uint4 rows[kSteps];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int64_t slot = page * RowTile::kPageSize + step * kRowsPerStep + first_row;
        rows[step] = *reinterpret_cast<const uint4*>(p.v + slot * p.slot_stride + head * p.head_stride + chunk * 16);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int row = step * kRowsPerStep + first_row;
        uint4& x = rows[step];
        if (row >= tokens) x = {without_nan(x.x), without_nan(x.y), without_nan(x.z), without_nan(x.w)};
        *reinterpret_cast<uint4*>(shared.v + swizzled_offset(row, chunk)) = x;
      }
      __syncthreads();
      transpose_v(shared.v, shared.vt, warp, lane, RowTile::kPageSize - 1);
      __syncthreads();
      uint4* tile = reinterpret_cast<uint4*>(p.tiles + (head * p.pool_pages + page) * RowTile::kTileBytes);
#pragma unroll
      for (int j = 0; j < RowTile::kTileBytes / 16 / RowTile::kThreads; ++j)
        tile[j * RowTile::kThreads + t] = reinterpret_cast<const uint4*>(shared.vt)[j * RowTile::kThreads + t];
    }
    if (own_mark != 0) marks[own] = 0;
  }
}

inline cudaError_t launch_value_tiles(const ValueTileParams& params, int kv_heads, int processors, cudaStream_t stream) {
  constexpr int kCtasPerProcessor = 4;
  if (params.pool_pages <= 0 || kv_heads <= 0) return cudaSuccess;
  const int ctas = min(params.pool_pages, max(1, processors * kCtasPerProcessor / kv_heads));
  value_tile_kernel<<<dim3(ctas, kv_heads), RowTile::kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace pw
