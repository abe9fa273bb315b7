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
//
// One more CTA per KV head writes the order in which groups are drawn: most pages first, so that the last groups to be drawn, whose
// ends leave SMs idle, are short ones.
#pragma once

#include "attention.cuh"
#include "ptx/dependent_launch.cuh"

namespace pw {

constexpr int kCountBins = 256;  // page counts of a group; larger ones share the last bin

struct ValueTileShared {
  union {
    struct {
      alignas(1024) uint8_t v[RowTile::kTileBytes];
      alignas(1024) uint8_t vt[RowTile::kTileBytes];
      int32_t marks[RowTile::kThreads];
    };
    struct {
      int32_t bins[kCountBins];
      int32_t sums[RowTile::kWarps];
    };
  };
};

struct ValueTileParams {
  const uint8_t* v;  // [slots, kv_heads, 128] E4M3
  int64_t slot_stride, head_stride;
  int32_t* marks;
  uint8_t* tiles;
  int pool_pages;
  const int32_t* counts;  // [kv_heads, groups] pages of each group
  int32_t* order;         // [kv_heads * groups] numbers kv_head * groups + group; heads take turns
  int groups;
};

// E4M3 NaN (0x7F, 0xFF) -> 0 in four bytes. Behind the end of every request a page may hold anything, and a probability of zero
// does not undo a NaN.
__device__ __forceinline__ uint32_t without_nan(uint32_t x) {
  const uint32_t nan = ((x & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  return x & ~((nan >> 7) * 0xFFu);
}

// Sorts the groups of one KV head by their number of pages, largest first (counting sort; equal ones in any order).
__device__ __forceinline__ void order_groups(const ValueTileParams& p, int head, int heads, int32_t (&bins)[kCountBins], int32_t* sums) {
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  static_assert(kCountBins == 2 * RowTile::kThreads, "two bins a thread");
  const int32_t* counts = p.counts + static_cast<int64_t>(head) * p.groups;
  auto bin = [&](int group) { return kCountBins - 1 - min(max(counts[group], 0), kCountBins - 1); };
  bins[2 * t] = bins[2 * t + 1] = 0;
  __syncthreads();
  for (int group = t; group < p.groups; group += RowTile::kThreads) atomicAdd(&bins[bin(group)], 1);
  __syncthreads();
  const int first = bins[2 * t], both = first + bins[2 * t + 1];
  int before = both;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += below;
  }
  if (lane == 31) sums[warp] = before;
  before -= both;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += sums[w];
  bins[2 * t] = before;
  bins[2 * t + 1] = before + first;
  __syncthreads();
  for (int group = t; group < p.groups; group += RowTile::kThreads) {
    const int64_t place = atomicAdd(&bins[bin(group)], 1);
    p.order[place * heads + head] = head * p.groups + group;
  }
}

// grid (CTAs for pages + 1, kv_heads)
__global__ void __launch_bounds__(RowTile::kThreads) value_tile_kernel(const __grid_constant__ ValueTileParams p) {
  __shared__ ValueTileShared shared;
  constexpr int kChunks = RowTile::kHeadDim / 16;
  constexpr int kRowsPerStep = RowTile::kThreads / kChunks;
  constexpr int kSteps = RowTile::kPageSize / kRowsPerStep;
  const int t = threadIdx.x, warp = t / 32, lane = t % 32, chunk = t % kChunks, first_row = t / kChunks;
  const int64_t head = blockIdx.y;
  int32_t* marks = p.marks + head * p.pool_pages;
  const int workers = gridDim.x - 1;
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (blockIdx.x == workers) {
    order_groups(p, blockIdx.y, gridDim.y, shared.bins, shared.sums);
    return;
  }

#pragma unroll 1
  for (int base = blockIdx.x; base < p.pool_pages; base += workers * RowTile::kThreads) {
    // Each thread looks at one page; pages of one CTA are `workers` apart, so that neighbours go to different SMs.
    const int64_t own = base + static_cast<int64_t>(t) * workers;
    const int own_mark = own < p.pool_pages ? marks[own] : 0;
    if (!__syncthreads_or(own_mark != 0)) continue;  // also: the last round's marks have been read
    shared.marks[t] = own_mark;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < RowTile::kThreads && base + static_cast<int64_t>(i) * workers < p.pool_pages; ++i) {
      const int64_t page = base + static_cast<int64_t>(i) * workers;
      const int tokens = shared.marks[i];
      if (tokens == 0) continue;
      __syncthreads();  // the last tile has left shared memory
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
  if (kv_heads <= 0) return cudaSuccess;
  const int workers = min(params.pool_pages, max(1, processors * kCtasPerProcessor / kv_heads));
  return ptx::launch_early(value_tile_kernel, dim3(workers + 1, kv_heads), dim3(RowTile::kThreads), 0, stream, params);
}

}  // namespace pw
