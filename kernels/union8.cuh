// Union attention: exact softmax attention of a group of queries over the union of the KV pages they picked.
//
// What it computes, for every query i, head h and with S_i the pages that i picked (Step 3 of the sparse prefill):
//   out[i, h] = sum_t p_t V[t] / sum_t p_t,  p_t = exp(sm_scale * Q[i, h] . K[t]),  over t in the pages of S_i, t <= limit_i
// The plan lists, per group, the union of the members' pages in ascending order and, per page, which slots picked it. A page
// is read once for the whole group; a row that did not pick it multiplies by zeros, so its sums do not change by one bit, and
// every row meets its own pages in ascending order: the result of a query does not depend on the group it is in.
//
// Mapping: a cluster of kClusterSize CTAs runs one group. Each CTA is one warpgroup and owns 4 queries x 16 heads = 64 rows
// of M64 wgmma. Two warps share two queries, 8 heads each (TileRows in attention.cuh): of a thread's two rows one belongs to
// query w / 2 of warp w, the other to query w / 2 + 2, so membership is uniform in a warp for either row. kClusterSize 2 is
// Union8 (the paper's kernel), 1 is Union4.
//
// Precision: Q is quantised per head-row to E4M3, K and V are E4M3; S = Q K^T and O = P V accumulate in FP32; the softmax
// runs in FP32; P is scaled by 2^6 before its rounding to E4M3, and so are the row sums, so that the factor cancels. P is taken
// from a reference that is raised only when a page's probabilities could saturate (kProbabilityScaleLog2 in attention.cuh).
//
// Shared memory (bytes)                    written by                      read by                       guarded by
//   k, v     [2 slots] 16384 each          copy engines of both CTAs       wgmma (K), ldmatrix (V)       page_ready, slot_free
//   vt       [2]       16384               all warps (transposed V)        wgmma                         __syncthreads
//   q                   8192               all warps                       wgmma                         __syncthreads
//   entries             8 per page         all threads                     all threads                   __syncthreads
//
// Pipeline of one page (per warp; copies of the next page are in flight throughout):
//   wait page_ready -> wait the last page's P V -> issue S = Q K^T ----> wait S -> arrive slot_free -> softmax -> sync -> issue P V
//                                                  V -> V^T in vt                                                    refill slot
// A page that no query of the CTA picked is skipped in arithmetic, not in the protocol: its slot is waited for and released.
//
// page_ready[s] counts bytes: one arrival with the expected bytes by this CTA's producer, the rest by both copy engines.
// slot_free[s] counts one arrival from every warp of every CTA of the cluster: a copy writes the slot in all of them.
#pragma once

#include "attention.cuh"
#include "ptx/cluster.cuh"

namespace pw {

// ---------------------------------------------------------------- Types

template <int kClusterSize_>
struct UnionTraits {
  using Rows = TileRows<4>;
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kGroupSize = kClusterSize * Rows::kQueries;
  static constexpr int kMaxUnion = kGroupSize * kMaxTopk;
  static constexpr int kStages = 2;
  static constexpr int kSharePerCta = RowTile::kTileBytes / kClusterSize;  // what one CTA loads for all of the cluster
  static constexpr int kTokensPerCopy = RowTile::kPageSize / kClusterSize;
  static constexpr int kCtasPerSm = 2;  // 2 x 106 KiB of the SM's 228 KiB shared memory
};

struct UnionEntry {
  int32_t slot;           // physical page
  uint32_t page_and_mask;  // logical page | mask << 24, the mask cleared of slots that lie wholly before the page
};
constexpr int kMaskShift = 24;
constexpr uint32_t kPageBits = (1u << kMaskShift) - 1;

template <class Traits>
struct alignas(1024) UnionSharedStorage {
  uint8_t k[Traits::kStages][RowTile::kTileBytes];
  uint8_t v[Traits::kStages][RowTile::kTileBytes];
  uint8_t vt[2][RowTile::kTileBytes];
  uint8_t q[RowTile::kQBytes];
  UnionEntry entries[Traits::kMaxUnion];
  float row_scale[RowTile::kRows];
  uint64_t page_ready[Traits::kStages];
  uint64_t slot_free[Traits::kStages];
};

// ---------------------------------------------------------------- Kernel

template <class Traits>
__global__ void __launch_bounds__(RowTile::kThreads, Traits::kCtasPerSm) __cluster_dims__(Traits::kClusterSize, 1, 1)
    union_attention_kernel(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                           const __grid_constant__ UnionAttentionParams p) {
  using Rows = typename Traits::Rows;
  extern __shared__ uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<UnionSharedStorage<Traits>*>(raw_shared);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int rank = Traits::kClusterSize == 1 ? 0 : ptx::cluster_cta_rank();
  const int kv_head = blockIdx.y;
  const int64_t group = static_cast<int64_t>(kv_head) * p.groups + blockIdx.x / Traits::kClusterSize;

  const int32_t* group_queries = p.queries + group * Traits::kGroupSize;
  const int32_t* group_limits = p.limits + group * Traits::kGroupSize;
  bool spare = true;
  for (int r = 0; r < Traits::kGroupSize; ++r) spare &= group_queries[r] < 0;
  if (spare) return;  // all slots are empty, for both CTAs
  const int count = min(p.counts[group], Traits::kMaxUnion);
  const int slot = rank * Rows::kQueries + Rows::query_of(warp, 0);
  const int query[2] = {group_queries[slot], group_queries[slot + Rows::kPairs]};
  const int limit[2] = {group_limits[slot], group_limits[slot + Rows::kPairs]};

  // -------- Set-up: barriers, the group's page list, Q
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::mbarrier_init(&shared.page_ready[s], 1);
      ptx::mbarrier_init(&shared.slot_free[s], Traits::kClusterSize * RowTile::kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  int last_visible = -1;  // the last position that any slot of the group sees
  for (int r = 0; r < Traits::kGroupSize; ++r) last_visible = max(last_visible, group_limits[r]);
  if (threadIdx.x < count) {
    const int64_t at = group * p.max_union + threadIdx.x;
    const int page = p.pages[at], slot = p.slots[at];
    uint32_t mask = static_cast<const UnionMask<Traits::kGroupSize>*>(p.masks)[at];
    for (int r = 0; r < Traits::kGroupSize; ++r)
      if (group_limits[r] < page * RowTile::kPageSize) mask &= ~(1u << r);
    if (slot < 0) mask = 0;
    shared.entries[threadIdx.x] = {max(slot, 0), static_cast<uint32_t>(page) | mask << kMaskShift};
  }
  const float softmax_scale_log2 = p.softmax_scale_log2 * (p.k_scale_device ? *p.k_scale_device : 1.0f);
  quantise_query<E4m3Math<1>, Rows>(p, shared.q, shared.row_scale, group_queries[rank * Rows::kQueries + warp], kv_head, warp, lane, softmax_scale_log2);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if constexpr (Traits::kClusterSize > 1) {  // no copy may reach a CTA whose barriers are not ready
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  // Copies this CTA's share of page i to every CTA of the cluster.
  auto load_page = [&](int i) {
    const int s = i % Traits::kStages;
    const int first_token = shared.entries[i].slot * RowTile::kPageSize + rank * Traits::kTokensPerCopy;
    ptx::mbarrier_arrive_expect_tx(&shared.page_ready[s], 2 * RowTile::kTileBytes);
    uint8_t* k = shared.k[s] + rank * Traits::kSharePerCta;
    uint8_t* v = shared.v[s] + rank * Traits::kSharePerCta;
    if constexpr (Traits::kClusterSize > 1) {
      constexpr uint16_t kAllCtas = (1u << Traits::kClusterSize) - 1;
      ptx::tma_load_3d_multicast(k, &k_map, 0, kv_head, first_token, &shared.page_ready[s], kAllCtas);
      ptx::tma_load_3d_multicast(v, &v_map, 0, kv_head, first_token, &shared.page_ready[s], kAllCtas);
    } else {
      ptx::tma_load_3d(k, &k_map, 0, kv_head, first_token, &shared.page_ready[s]);
      ptx::tma_load_3d(v, &v_map, 0, kv_head, first_token, &shared.page_ready[s]);
    }
  };
  const bool is_producer = threadIdx.x == 0;
  if (is_producer) {
#pragma unroll
    for (int i = 0; i < Traits::kStages; ++i)
      if (i < count) load_page(i);
  }

  const int row = lane >> 2;
  const float scale[2] = {shared.row_scale[warp * 16 + row], shared.row_scale[warp * 16 + row + 8]};
  const uint64_t q_descriptor = ptx::wgmma_descriptor(shared.q);
  RowState state[2];
  float o[ptx::kAccumulators];
#pragma unroll
  for (int i = 0; i < ptx::kAccumulators; ++i) o[i] = 0.0f;

  // -------- Walk the union
  int vt_slot = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int s = i % Traits::kStages;
    const uint32_t parity = (i / Traits::kStages) & 1;
    const uint32_t page_and_mask = shared.entries[i].page_and_mask;
    const int first_token = (page_and_mask & kPageBits) * RowTile::kPageSize;
    const uint32_t members = (page_and_mask >> (kMaskShift + rank * Rows::kQueries)) & 0xF;
    // Every warp arrives, after it has itself seen the page, or the barrier's phases could run ahead of a slow warp.
    auto release_slot = [&] {
      __syncwarp();
      if (lane < Traits::kClusterSize) ptx::mbarrier_arrive_cluster(&shared.slot_free[s], lane);
    };

    ptx::mbarrier_wait(&shared.page_ready[s], parity);
    if (members == 0) {
      release_slot();
    } else {
      // The last page's P V ends here, not after S is issued: with both in flight ptxas serialises every wgmma (C7514).
      ptx::wgmma_wait<0>();
      ptx::pin_registers(o);
      float logits[ptx::kAccumulators];
      ptx::pin_registers(logits);
      ptx::wgmma_fence();
      issue_logits(logits, q_descriptor, ptx::wgmma_descriptor(shared.k[s]));
      ptx::wgmma_commit();

      // While S is computed. vt[vt_slot] is free: all warps were past its P V, two pages ago, at the last barrier.
      transpose_v(shared.v[s], shared.vt[vt_slot], warp, lane, last_visible - first_token);
      ptx::fence_proxy_async_shared();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(logits);
      release_slot();

      uint32_t fragments[1][kBlockSteps][4];  // P, one term
      BlockSoftmax<E4m3Math<1>, Rows> softmax(members, first_token, limit, warp);
      softmax.begin(logits, state, scale, lane);
      softmax.finish(logits, state, scale, o, fragments, lane);
      __syncthreads();  // V^T is complete; all warps are past the P V of the page before the last
      ptx::pin_registers(o);
      ptx::wgmma_fence();
      issue_values<E4m3Math<1>>(o, fragments, shared.vt[vt_slot]);
      ptx::wgmma_commit();
      vt_slot ^= 1;
    }
    if (is_producer && i + Traits::kStages < count) {
      ptx::mbarrier_wait(&shared.slot_free[s], parity);
      load_page(i + Traits::kStages);
    }
    __syncwarp();  // the producer's warp is whole again before the next wgmma
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);

  write_rows<E4m3Math<1>, Rows>(p, o, state, query, kv_head, warp, lane);
  if constexpr (Traits::kClusterSize > 1) {  // the peer may still arrive at this CTA's barriers, or copy into its slots
    ptx::cluster_arrive();  // after this CTA's last arrivals at the peer's barriers
    ptx::cluster_wait();
  }
}

// ---------------------------------------------------------------- Host

template <class Traits>
cudaError_t launch_union_attention(const CUtensorMap& k_map, const CUtensorMap& v_map, const UnionAttentionParams& params,
                                   int kv_heads, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(UnionSharedStorage<Traits>);
  static_assert(kSharedBytes * Traits::kCtasPerSm <= (228 - Traits::kCtasPerSm) * 1024, "CTAs per SM exceed shared memory");
  auto* kernel = union_attention_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(params.groups * Traits::kClusterSize, kv_heads), RowTile::kThreads, kSharedBytes, stream>>>(k_map, v_map, params);
  return cudaGetLastError();
}

}  // namespace pw
