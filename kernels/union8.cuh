// Union attention: exact softmax attention of a group of queries over the union of the KV pages they picked.
//
// What it computes, for every query i, head h and with S_i the pages that i picked (DESIGN: Step 3 of the sparse prefill):
//   out[i, h] = sum_t p_t V[t] / sum_t p_t,  p_t = exp(sm_scale * Q[i, h] . K[t]),  over t in the pages of S_i, t <= limit_i
// The plan lists, per group, the union of the members' pages in ascending order and, per page, which slots picked it. A page
// is read once for the whole group; a row that did not pick it multiplies by zeros, so its sums do not change by one bit, and
// every row meets its own pages in ascending order: the result of a query does not depend on the group it is in.
//
// Mapping: a cluster of kClusterSize CTAs runs one group. Each CTA is one warpgroup and owns 4 queries x 16 heads = 64 rows
// of M64 wgmma; warp w holds the 16 heads of query w, so membership is uniform within a warp. kClusterSize 2 is Union8 (the
// paper's kernel), 1 is Union4.
//
// Precision: Q is quantised per head-row to E4M3, K and V are E4M3; S = Q K^T and O = P V accumulate in FP32; the softmax
// runs in FP32; P is scaled by 2^8 before its rounding to E4M3, and so are the row sums, so that the factor cancels.
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

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx/cluster.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace pw {

// ---------------------------------------------------------------- Types

struct UnionAttentionParams {
  const __nv_bfloat16* q;  // [tokens, kv_heads * 16, 128], last stride 1
  int64_t q_token_stride, q_head_stride;
  __nv_bfloat16* out;  // same shape
  int64_t out_token_stride, out_head_stride;
  const int32_t* slots;    // [kv_heads, groups, max_union] physical page, -1: unreadable
  const int32_t* pages;    // [kv_heads, groups, max_union] logical page
  const uint8_t* masks;    // [kv_heads, groups, max_union]
  const int32_t* counts;   // [kv_heads, groups]
  const int32_t* queries;  // [kv_heads, groups, group_size]
  const int32_t* limits;   // [kv_heads, groups, group_size]
  int groups;
  int max_union;
  float softmax_scale_log2;  // sm_scale * k_scale * log2(e)
  float v_scale;
  const float* k_scale_device;  // optional further factors read on the device (per-tensor scales kept there)
  const float* v_scale_device;
};

template <int kClusterSize_>
struct UnionTraits {
  static constexpr int kClusterSize = kClusterSize_;
  static constexpr int kHeadDim = 128;
  static constexpr int kPageSize = 128;
  static constexpr int kHeadsPerKvHead = 16;
  static constexpr int kQueriesPerCta = 4;
  static constexpr int kGroupSize = kClusterSize * kQueriesPerCta;
  static constexpr int kMaxUnion = kGroupSize * 16;  // top-k of at most 16 pages a query
  static constexpr int kRows = kQueriesPerCta * kHeadsPerKvHead;
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kPageSize * kHeadDim;            // one page of K or of V, E4M3
  static constexpr int kSharePerCta = kTileBytes / kClusterSize;     // what one CTA loads for all of the cluster
  static constexpr int kTokensPerCopy = kPageSize / kClusterSize;
  static constexpr int kCtasPerSm = 2;  // 2 x 107 KiB of the SM's 228 KiB shared memory
  static_assert(kRows == 64, "one wgmma M64 tile holds the CTA's rows");
  static_assert(kWarps == kQueriesPerCta, "warp w holds the heads of query w");
};

// E4M3's largest value is 448; probabilities are at most 1, so scaled by 2^8 they use its range without saturating.
constexpr float kProbabilityScaleLog2 = 8.0f;
constexpr float kE4m3Max = 448.0f;
// Finite stand-in for minus infinity: a row that has seen nothing yet, and keys behind a query's limit. No NaN can form.
constexpr float kMasked = -1e30f;
constexpr float kSmallestAmax = 1e-12f;  // keeps the scale of an all-zero Q row finite

struct UnionEntry {
  int32_t slot;           // physical page
  uint32_t page_and_mask;  // logical page | mask << 24, the mask cleared of slots that lie wholly before the page
};
constexpr int kMaskShift = 24;
constexpr uint32_t kPageBits = (1u << kMaskShift) - 1;

template <class Traits>
struct alignas(1024) UnionSharedStorage {
  uint8_t k[Traits::kStages][Traits::kTileBytes];
  uint8_t v[Traits::kStages][Traits::kTileBytes];
  uint8_t vt[2][Traits::kTileBytes];
  uint8_t q[Traits::kRows * Traits::kHeadDim];
  UnionEntry entries[Traits::kMaxUnion];
  float row_scale[Traits::kRows];
  uint64_t page_ready[Traits::kStages];
  uint64_t slot_free[Traits::kStages];
};

// ---------------------------------------------------------------- Pieces

// Chunk (16 bytes) of a row under the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_offset(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Quantises the 16 heads of one query (one warp) to E4M3 rows 16w .. 16w + 15 of the Q tile and stores each row's softmax
// scale. `query` < 0: zeros.
template <class Traits>
__device__ __forceinline__ void quantise_query(const UnionAttentionParams& p, UnionSharedStorage<Traits>& shared, int query,
                                               int kv_head, int warp, int lane, float softmax_scale_log2) {
  constexpr int kHeadsPerStep = 2;  // 16 lanes x 16 bytes are one head's 128 BF16 values
  constexpr int kSteps = Traits::kHeadsPerKvHead / kHeadsPerStep;
  const int half = lane >> 4, part = lane & 15;
  uint4 raw[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int head = step * kHeadsPerStep + half;
    raw[step] = make_uint4(0, 0, 0, 0);
    if (query >= 0) {
      const __nv_bfloat16* row = p.q + query * p.q_token_stride + (kv_head * Traits::kHeadsPerKvHead + head) * p.q_head_stride;
      raw[step] = *reinterpret_cast<const uint4*>(row + part * 8);
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    float x[8];
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw[step]);
    float amax = kSmallestAmax;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
      amax = fmaxf(amax, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset >>= 1) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
    const float inverse = kE4m3Max / amax;
    const uint32_t row = warp * Traits::kHeadsPerKvHead + step * kHeadsPerStep + half;
    uint2 packed;
    packed.x = ptx::to_e4m3x4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    packed.y = ptx::to_e4m3x4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse);
    *reinterpret_cast<uint2*>(shared.q + swizzled_offset(row, part >> 1) + (part & 1) * 8) = packed;
    if (part == 0) shared.row_scale[row] = amax / kE4m3Max * softmax_scale_log2;
  }
}

// Transposes a V tile [token, dim] to V^T [dim', token'], the K-major operand that FP8 wgmma needs. Both indices are permuted
// inside blocks of 16, so that the registers of S can be used as P without a shuffle and no bank is hit twice:
//   position 4t + {0,1,2,3} of a 16-token block holds tokens 2t, 2t + 1, 8 + 2t, 8 + 2t + 1  (as S's accumulators lie)
//   row c of a 16-dim block holds dim 2c, row 8 + c dim 2c + 1
// Tokens behind `last_token` (in the page) read as zero: nobody sees them, and the cache may hold anything there.
template <class Traits>
__device__ __forceinline__ void transpose_v(const uint8_t* v, uint8_t* vt, int warp, int lane, int last_token) {
  constexpr int kSteps = Traits::kPageSize / 32;
  const uint32_t v_base = ptx::shared_address(v), vt_base = ptx::shared_address(vt);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t dim_block = warp * 2 + block;
    uint32_t x[kSteps][4];  // x[step][m]: tokens 32 step + 8m + 2t and + 1 (low, high half), dims 2c and 2c + 1
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::ldmatrix_x4_trans(x[step], v_base + swizzled_offset(step * 32 + lane, dim_block));
    if (last_token < Traits::kPageSize - 1) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int token = step * 32 + m * 8 + 2 * (lane & 3);
          x[step][m] &= (token <= last_token ? 0x0000FFFFu : 0u) | (token + 1 <= last_token ? 0xFFFF0000u : 0u);
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t row = dim_block * 16 + (lane & 15), chunk = step * 2 + (lane >> 4);
      const uint32_t(&y)[4] = x[step];
      ptx::stmatrix_x4(vt_base + swizzled_offset(row, chunk), __byte_perm(y[0], y[1], 0x6420), __byte_perm(y[0], y[1], 0x7531),
                       __byte_perm(y[2], y[3], 0x6420), __byte_perm(y[2], y[3], 0x7531));
    }
  }
}

// Running softmax of the two rows (heads g and g + 8 of the warp's query) that a thread holds parts of.
struct RowState {
  float max = kMasked;  // of the scaled logits, base 2
  float sum = 0.0f;     // this thread's part, scaled by 2^kProbabilityScaleLog2
};

// Turns logits of one row into probabilities in place; returns the factor for what the row has gathered so far.
// Row r of the pair: 0 -> accumulators 4j, 4j + 1; 1 -> 4j + 2, 4j + 3.
template <int kRow>
__device__ __forceinline__ float softmax_row(float (&s)[ptx::kAccumulators], RowState& state, float scale) {
  float row_max = kMasked;
#pragma unroll
  for (int j = 0; j < 16; ++j) row_max = fmaxf(row_max, fmaxf(s[4 * j + 2 * kRow], s[4 * j + 2 * kRow + 1]));
  row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
  row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
  const float new_max = fmaxf(state.max, row_max * scale);
  const float correction = ptx::exp2_approx(state.max - new_max);
  const float bias = kProbabilityScaleLog2 - new_max;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    float& a = s[4 * j + 2 * kRow];
    float& b = s[4 * j + 2 * kRow + 1];
    a = ptx::exp2_approx(fmaf(a, scale, bias));
    b = ptx::exp2_approx(fmaf(b, scale, bias));
    sum += a + b;
  }
  state.sum = fmaf(state.sum, correction, sum);
  state.max = new_max;
  return correction;
}

// ---------------------------------------------------------------- Kernel

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm) __cluster_dims__(Traits::kClusterSize, 1, 1)
    union_attention_kernel(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                           const __grid_constant__ UnionAttentionParams p) {
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
  const int query = group_queries[rank * Traits::kQueriesPerCta + warp];
  const int limit = group_limits[rank * Traits::kQueriesPerCta + warp];

  // -------- Set-up: barriers, the group's page list, Q
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::mbarrier_init(&shared.page_ready[s], 1);
      ptx::mbarrier_init(&shared.slot_free[s], Traits::kClusterSize * Traits::kWarps);
    }
    ptx::fence_mbarrier_init();
  }
  int last_visible = -1;  // the last position that any slot of the group sees
  for (int r = 0; r < Traits::kGroupSize; ++r) last_visible = max(last_visible, group_limits[r]);
  if (threadIdx.x < count) {
    const int64_t at = group * p.max_union + threadIdx.x;
    const int page = p.pages[at], slot = p.slots[at];
    uint32_t mask = p.masks[at];
    for (int r = 0; r < Traits::kGroupSize; ++r)
      if (group_limits[r] < page * Traits::kPageSize) mask &= ~(1u << r);
    if (slot < 0) mask = 0;
    shared.entries[threadIdx.x] = {max(slot, 0), static_cast<uint32_t>(page) | mask << kMaskShift};
  }
  const float softmax_scale_log2 = p.softmax_scale_log2 * (p.k_scale_device ? *p.k_scale_device : 1.0f);
  quantise_query<Traits>(p, shared, query, kv_head, warp, lane, softmax_scale_log2);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if constexpr (Traits::kClusterSize > 1) {  // no copy may reach a CTA whose barriers are not ready
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }

  // Copies this CTA's share of page i to every CTA of the cluster.
  auto load_page = [&](int i) {
    const int s = i % Traits::kStages;
    const int first_token = shared.entries[i].slot * Traits::kPageSize + rank * Traits::kTokensPerCopy;
    ptx::mbarrier_arrive_expect_tx(&shared.page_ready[s], 2 * Traits::kTileBytes);
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
    const int first_token = (page_and_mask & kPageBits) * Traits::kPageSize;
    const uint32_t members = (page_and_mask >> (kMaskShift + rank * Traits::kQueriesPerCta)) & 0xF;
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
      const uint64_t k_descriptor = ptx::wgmma_descriptor(shared.k[s]);
      ptx::pin_registers(logits);
      ptx::wgmma_fence();
      ptx::wgmma_m64n128k32_ss<false>(logits, q_descriptor, k_descriptor);
#pragma unroll
      for (int step = 1; step < Traits::kHeadDim / 32; ++step)
        ptx::wgmma_m64n128k32_ss<true>(logits, q_descriptor + step * ptx::kDescriptorStepK32,
                                       k_descriptor + step * ptx::kDescriptorStepK32);
      ptx::wgmma_commit();

      // While S is computed. vt[vt_slot] is free: all warps were past its P V, two pages ago, at the last barrier.
      transpose_v<Traits>(shared.v[s], shared.vt[vt_slot], warp, lane, last_visible - first_token);
      ptx::fence_proxy_async_shared();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(logits);
      release_slot();

      uint32_t probabilities[4][4] = {};  // A fragments of the four k32 steps of P V
      if ((members >> warp) & 1) {
        const int last_key = limit - first_token;
        if (last_key < Traits::kPageSize - 1) {
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            const int key = 8 * j + 2 * (lane & 3);
            if (key > last_key) logits[4 * j] = logits[4 * j + 2] = kMasked;
            if (key + 1 > last_key) logits[4 * j + 1] = logits[4 * j + 3] = kMasked;
          }
        }
        const float correction[2] = {softmax_row<0>(logits, state[0], scale[0]), softmax_row<1>(logits, state[1], scale[1])};
        if (__any_sync(~0u, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            o[4 * j] *= correction[0];
            o[4 * j + 1] *= correction[0];
            o[4 * j + 2] *= correction[1];
            o[4 * j + 3] *= correction[1];
          }
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
          const float* x = logits + 16 * step;  // tokens 32 step + {0, 8, 16, 24} + 2q
          probabilities[step][0] = ptx::to_e4m3x4(x[0], x[1], x[4], x[5]);
          probabilities[step][1] = ptx::to_e4m3x4(x[2], x[3], x[6], x[7]);
          probabilities[step][2] = ptx::to_e4m3x4(x[8], x[9], x[12], x[13]);
          probabilities[step][3] = ptx::to_e4m3x4(x[10], x[11], x[14], x[15]);
        }
      }
      __syncthreads();  // V^T is complete; all warps are past the P V of the page before the last
      const uint64_t vt_descriptor = ptx::wgmma_descriptor(shared.vt[vt_slot]);
      ptx::pin_registers(o);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
        ptx::wgmma_m64n128k32_rs(o, probabilities[step], vt_descriptor + step * ptx::kDescriptorStepK32);
      ptx::wgmma_commit();
      vt_slot ^= 1;
    }
    if (is_producer && i + Traits::kStages < count) {
      ptx::mbarrier_wait(&shared.slot_free[s], parity);
      load_page(i + Traits::kStages);
    }
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);

  // -------- Normalise and write the query's rows
  if (query >= 0) {
    const float v_scale = p.v_scale * (p.v_scale_device ? *p.v_scale_device : 1.0f);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state[r].sum;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float norm = sum > 0.0f ? v_scale / sum : 0.0f;  // a query that sees nothing gets a zero row
      const int head = kv_head * Traits::kHeadsPerKvHead + row + 8 * r;
      __nv_bfloat16* out = p.out + query * p.out_token_stride + head * p.out_head_stride + 4 * (lane & 3);
#pragma unroll
      for (int block = 0; block < Traits::kHeadDim / 16; ++block) {  // dims 16 block + 4q + {0, 1, 2, 3}
        const float* even = o + 8 * block + 2 * r;
        const float* odd = even + 4;
        __nv_bfloat162 low = __floats2bfloat162_rn(even[0] * norm, odd[0] * norm);
        __nv_bfloat162 high = __floats2bfloat162_rn(even[1] * norm, odd[1] * norm);
        uint2 packed;
        packed.x = *reinterpret_cast<uint32_t*>(&low);
        packed.y = *reinterpret_cast<uint32_t*>(&high);
        *reinterpret_cast<uint2*>(out + 16 * block) = packed;
      }
    }
  }
  if constexpr (Traits::kClusterSize > 1) {  // the peer may still arrive at this CTA's barriers
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

// ---------------------------------------------------------------- Host

// A cache [slots, kv_heads, 128] of E4M3 as a 3-D tensor map whose box is `tokens` rows of one head.
inline CUresult encode_cache_map(CUtensorMap* map, const void* cache, int64_t slots, int kv_heads, int64_t slot_stride,
                                 int64_t head_stride, int tokens) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode encode = [] {  // libcuda is not linked, so that the library loads on a machine without a driver
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return CUDA_ERROR_NOT_FOUND;
  const cuuint64_t dims[3] = {128, static_cast<cuuint64_t>(kv_heads), static_cast<cuuint64_t>(slots)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_stride), static_cast<cuuint64_t>(slot_stride)};
  const cuuint32_t box[3] = {128, 1, static_cast<cuuint32_t>(tokens)};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(cache), dims, strides, box, element_strides,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <class Traits>
cudaError_t launch_union_attention(const CUtensorMap& k_map, const CUtensorMap& v_map, const UnionAttentionParams& params,
                                   int kv_heads, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(UnionSharedStorage<Traits>);
  static_assert(kSharedBytes * Traits::kCtasPerSm <= (228 - Traits::kCtasPerSm) * 1024, "CTAs per SM exceed shared memory");
  auto* kernel = union_attention_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  kernel<<<dim3(params.groups * Traits::kClusterSize, kv_heads), Traits::kThreads, kSharedBytes, stream>>>(k_map, v_map, params);
  return cudaGetLastError();
}

}  // namespace pw
