// What the attention kernels share: parameters, numeric constants, and the pieces of one warpgroup's work on 64 rows (4 queries x 16
// heads): quantising Q, transposing V, softmax page by page, writing the result, and the tensor maps of the caches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"

namespace pw {

// ---------------------------------------------------------------- Types

struct UnionAttentionParams {
  const __nv_bfloat16* q;  // [tokens, kv_heads * heads, 128], last stride 1
  int64_t q_token_stride, q_head_stride;
  __nv_bfloat16* out;  // same shape
  int64_t out_token_stride, out_head_stride;
  const int32_t* slots;    // [kv_heads, groups, max_union] physical page, -1: unreadable
  const int32_t* pages;    // [kv_heads, groups, max_union] logical page
  const uint8_t* masks;    // [kv_heads, groups, max_union]
  const int32_t* counts;   // [kv_heads, groups]
  const int32_t* queries;  // [kv_heads, groups, group_size]
  const int32_t* limits;   // [kv_heads, groups, group_size]
  int heads;  // query heads per KV head, 1 to RowTile::kHeadsPerKvHead
  int groups;
  int max_union;
  float softmax_scale_log2;  // sm_scale * k_scale * log2(e)
  float v_scale;
  const float* k_scale_device;  // optional further factors read on the device (per-tensor scales kept there)
  const float* v_scale_device;
  // stream.cuh only
  int32_t* queue;              // [2] groups drawn, CTAs done; zero between launches
  const int32_t* order;        // [kv_heads * groups] in which groups are drawn
  const uint8_t* value_tiles;  // [kv_heads, pool_pages] tiles of V^T (value_tiles.cuh)
  int pool_pages;
};

// The tile every attention kernel here is built for: one warpgroup, 4 queries x 16 heads. Two warps share two queries, half of the heads
// each: rows 16w + 8r + 0 to 7 are heads 8 (w % 2) + 0 to 7 of query w / 2 + 2r. When one of the two picked a page, both warps work on it
// and are done in half the time; and the two are not neighbours in the group's order, which pick together most often. With fewer heads per
// KV head than 16 a query's other rows are zeros that nobody writes; with 8 or fewer, half of the warps have no softmax to do.
struct RowTile {
  static constexpr int kHeadDim = 128;
  static constexpr int kPageSize = 128;
  static constexpr int kHeadsPerKvHead = 16;
  static constexpr int kQueries = 4;
  static constexpr int kRows = kQueries * kHeadsPerKvHead;
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTileBytes = kPageSize * kHeadDim;  // one page of K or of V of one KV head, E4M3
  static constexpr int kQBytes = kRows * kHeadDim;
  static_assert(kRows == 64, "one wgmma M64 tile");
  static constexpr int kRowsPerThread = 2;  // an accumulator tile gives a thread parts of rows g and g + 8 of its warp
  static constexpr int kHeadsPerWarp = kHeadsPerKvHead / 2;

  // The query (0 to 3) that row r of the pair belongs to, in warp w.
  __host__ __device__ static constexpr int query_of(int warp, int r) { return warp / 2 + 2 * r; }
  __host__ __device__ static constexpr int row_of(int query, int head) {
    return 16 * (2 * (query % 2) + head / kHeadsPerWarp) + 8 * (query / 2) + head % kHeadsPerWarp;
  }
  static_assert(kWarps == kQueries && kHeadsPerWarp == 8, "two warps share two queries");
  // Which of a page's members a warp has work for: all, or none where its half of the heads is empty.
  __device__ __forceinline__ static uint32_t members_with_heads(int warp, int heads) {
    return kHeadsPerWarp * (warp % 2) < heads ? (1u << kQueries) - 1 : 0u;
  }
};

// Probabilities are 2^(logit - reference + kProbabilityScaleLog2), summed in fours. While no logit exceeds the row's reference such a
// sum is at most 4 x 2^6 = 256; while it is at most E4M3's largest value, 448, none of the four saturates. So sums that softmax
// needs anyway say when the reference must be raised, and no maximum of the logits is looked for before.
constexpr float kProbabilityScaleLog2 = 6.0f;
constexpr float kE4m3Max = 448.0f;
// Finite stand-in for minus infinity: a row that has seen nothing yet, and keys behind a query's limit. No NaN can form.
constexpr float kMasked = -1e30f;
constexpr float kSmallestAmax = 1e-12f;  // keeps the scale of an all-zero Q row finite
// Largest softmax scale of a row: times the largest sum of 128 E4M3 products (2.6e7) it stays far below FP32's limit.
constexpr float kLargestRowScale = 1e28f;
// A reference is rounded up by this part of itself, so that no probability exceeds its bound however large the logits are: the
// exponent is one exact multiply-add, which the rounded product it subtracts can otherwise undercut by half a unit.
constexpr float kReferenceRoundUp = 0x1p-22f;
// But by no more than this many bits, or the probabilities of a row of huge logits would all round to zero.
constexpr float kMostRoundUp = 4.0f;

// ---------------------------------------------------------------- Pieces

// Chunk (16 bytes) of a row under the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_offset(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// What a row of Q may be scaled to have as its largest magnitude before it is rounded to E4M3. Each row takes the candidate that leaves it
// the least squared error: with normally distributed elements 2.38 % instead of 2.57 % at 448 alone, where rounding P costs as much.
struct QueryScales {
  static constexpr int kCandidates = 3;
  __host__ __device__ static constexpr float largest(int candidate) { return candidate == 0 ? 256.0f : candidate == 1 ? 288.0f : kE4m3Max; }
};

// Brings a query's heads nearer: at most 32 lines of 128 bytes, one a lane.
__device__ __forceinline__ void prefetch_query(const UnionAttentionParams& p, int query, int kv_head, int lane) {
  constexpr int kLineElements = 128 / sizeof(__nv_bfloat16), kLinesPerHead = RowTile::kHeadDim / kLineElements;
  static_assert(kLinesPerHead * RowTile::kHeadsPerKvHead == 32, "a line a lane");
  const int head = lane / kLinesPerHead;
  if (query < 0 || head >= p.heads) return;
  ptx::prefetch_to_l2(p.q + query * p.q_token_stride + (kv_head * p.heads + head) * p.q_head_stride + lane % kLinesPerHead * kLineElements);
}

// Quantises the heads of one query, number `place` of the tile, to E4M3 rows of the Q tile and stores each row's softmax scale. Run
// by a warp, eight lanes a row. `query` < 0, or heads that there are not: zeros. The candidates' errors are summed in half precision, which is as good for choosing.
// With kTerms 2 a second tile behind the first takes what the first leaves of every value; the scale is a power of two then, so that the
// two hold all eight bits of a BF16 value.
template <int kTerms>
__device__ __forceinline__ void quantise_query(const UnionAttentionParams& p, uint8_t* q_tile, float* row_scale, int query,
                                               int kv_head, int place, int lane, float softmax_scale_log2) {
  constexpr int kLanesPerRow = 8, kRowsPerStep = 32 / kLanesPerRow;
  constexpr int kVectors = RowTile::kHeadDim / 8 / kLanesPerRow;  // of eight BF16 values; a row's lanes take them in turn
  constexpr int kPairs = 4 * kVectors;
  const int part = lane % kLanesPerRow;
  uint4 next[kVectors];
  auto load = [&](int head) {
    const __nv_bfloat16* row = p.q + query * p.q_token_stride + (kv_head * p.heads + head) * p.q_head_stride;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      next[v] = make_uint4(0, 0, 0, 0);
      if (query >= 0 && head < p.heads) next[v] = *reinterpret_cast<const uint4*>(row + (v * kLanesPerRow + part) * 8);
    }
  };
  load(lane / kLanesPerRow);
#pragma unroll 1
  for (int head = lane / kLanesPerRow; head < RowTile::kHeadsPerKvHead; head += kRowsPerStep) {
    uint4 raw[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) raw[v] = next[v];
    load(head + kRowsPerStep);  // under way while this row is worked on
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(raw);
    __nv_bfloat162 most = __habs2(pairs[0]);
#pragma unroll
    for (int i = 1; i < kPairs; ++i) most = __hmax2(most, __habs2(pairs[i]));
#pragma unroll
    for (int d = 1; d < kLanesPerRow; d *= 2) most = __hmax2(most, __shfl_xor_sync(~0u, most, d));
    const float amax = fmaxf(kSmallestAmax, __bfloat162float(__hmax(most.x, most.y)));

    const float inverse = QueryScales::largest(0) / amax;
    float least = 0.0f, factor = 1.0f, reciprocal = 1.0f / QueryScales::largest(0);
    if constexpr (kTerms == 1) {
      __half2 error[QueryScales::kCandidates];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 x = __bfloat1622float2(pairs[i]);
        const __half2 scaled = __floats2half2_rn(x.x * inverse, x.y * inverse);
#pragma unroll
        for (int c = 0; c < QueryScales::kCandidates; ++c) {
          const __half2 y = c == 0 ? scaled : __hmul2(scaled, __float2half2_rn(QueryScales::largest(c) / QueryScales::largest(0)));
          const __half2 d = __hsub2(ptx::round_to_e4m3(y), y);
          error[c] = i == 0 ? __hmul2(d, d) : __hfma2(d, d, error[c]);
        }
      }
#pragma unroll
      for (int c = 0; c < QueryScales::kCandidates; ++c) {
        const float ratio = QueryScales::largest(c) / QueryScales::largest(0);
        float sum = (__low2float(error[c]) + __high2float(error[c])) * (1.0f / (ratio * ratio));
#pragma unroll
        for (int d = 1; d < kLanesPerRow; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
        if (c == 0 || sum < least) {  // the first also where the row is not finite
          least = sum;
          factor = ratio;
          reciprocal = 1.0f / QueryScales::largest(c);
        }
      }
    }
    float chosen = inverse * factor;
    if constexpr (kTerms > 1) {
      chosen = ptx::power_of_two_below(chosen);
      reciprocal = 1.0f / (amax * chosen);
    }
    auto term = [&](int t, int i) {  // four values' term t
      const float2 low = __bfloat1622float2(pairs[2 * i]), high = __bfloat1622float2(pairs[2 * i + 1]);
      if constexpr (kTerms == 1) return ptx::to_e4m3x4(low.x * chosen, low.y * chosen, high.x * chosen, high.y * chosen);
      const __half2 a = __floats2half2_rn(low.x * chosen, low.y * chosen);
      const __half2 b = __floats2half2_rn(high.x * chosen, high.y * chosen);
      if (t == 0) return ptx::to_e4m3x4(a, b);
      return ptx::to_e4m3x4(__hsub2(a, ptx::round_to_e4m3(a)), __hsub2(b, ptx::round_to_e4m3(b)));
    };
    const uint32_t row = RowTile::row_of(place, head);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = v * kLanesPerRow + part;
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
        *reinterpret_cast<uint2*>(q_tile + t * RowTile::kQBytes + swizzled_offset(row, vector >> 1) + (vector & 1) * 8) =
            make_uint2(term(t, 2 * v), term(t, 2 * v + 1));
    }
    if (part == 0) row_scale[row] = fminf(amax * reciprocal * softmax_scale_log2, kLargestRowScale);
  }
}

// Transposes a V tile [token, dim] to V^T [dim', token'], the K-major operand that FP8 wgmma needs. Both indices are permuted
// inside blocks of 16, so that the registers of S can be used as P without a shuffle and no bank is hit twice:
//   position 4t + {0,1,2,3} of a 16-token block holds tokens 2t, 2t + 1, 8 + 2t, 8 + 2t + 1  (as S's accumulators lie)
//   row c of a 16-dim block holds dim 2c, row 8 + c dim 2c + 1
// Tokens behind `last_token` (in the page) read as zero: nobody sees them, and the cache may hold anything there.
__device__ __forceinline__ void transpose_v(const uint8_t* v, uint8_t* vt, int warp, int lane, int last_token) {
  constexpr int kSteps = RowTile::kPageSize / 32;
  const uint32_t v_base = ptx::shared_address(v), vt_base = ptx::shared_address(vt);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t dim_block = warp * 2 + block;
    uint32_t x[kSteps][4];  // x[step][m]: tokens 32 step + 8m + 2t and + 1 (low, high half), dims 2c and 2c + 1
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::ldmatrix_x4_trans(x[step], v_base + swizzled_offset(step * 32 + lane, dim_block));
    if (last_token < RowTile::kPageSize - 1) {
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

// Softmax of one of the two rows that a thread holds parts of.
struct RowState {
  float reference = kMasked;  // accepted logits (base 2, scaled) exceed it by log2(7) at most
  float sum = 0.0f;           // this thread's part, scaled by 2^kProbabilityScaleLog2
};

// The functions below work on row kRow of the thread's pair: its 32 logits of a page are s[4j + 2 kRow] and s[4j + 2 kRow + 1], keys
// 8j + 2q and 8j + 2q + 1.
constexpr int kRowValues = ptx::kAccumulators / RowTile::kRowsPerThread;
constexpr int kSteps = RowTile::kPageSize / 32;  // k32 steps of P V

template <int kRow>
__device__ __forceinline__ constexpr int value_index(int i) {
  return 4 * (i / 2) + 2 * kRow + i % 2;
}

// Masks the keys behind `last_key` (in the page). With one term the thread's first key is added to 32 constants, sums that the compiler
// keeps in registers; two terms of P leave no room for them, so it is taken from `last_key` once.
template <int kRow, int kTerms, int kFrom, int kTo>
__device__ __forceinline__ void mask_future_keys(float (&s)[ptx::kAccumulators], int last_key, int lane) {
  const int own = 2 * (lane & 3);
  const int first = kTerms == 1 ? own : 0, last = kTerms == 1 ? last_key : last_key - own;
#pragma unroll
  for (int i = kFrom; i < kTo; ++i)
    if (8 * (i / 2) + first + i % 2 > last) s[value_index<kRow>(i)] = kMasked;
}

// A row's probabilities of a page as sums of kTerms E4M3 values, four to a register; the sum before rounding and the largest sum of four.
template <int kTerms>
struct RowProbabilities {
  uint32_t fours[kTerms][kRowValues / 4];
  float sum, most;
};

// Rounds four probabilities to E4M3, or splits them into two terms: the first four bits of each, and what is left of it.
__device__ __forceinline__ void round_four(const float (&p)[4], int i, RowProbabilities<1>& row) {
  row.fours[0][i] = ptx::to_e4m3x4(p[0], p[1], p[2], p[3]);
}

__device__ __forceinline__ void round_four(const float (&p)[4], int i, RowProbabilities<2>& row) {
  const __half2 low = ptx::to_half2(p[0], p[1]), high = ptx::to_half2(p[2], p[3]);
  const __half2 first_low = ptx::first_four_bits(low), first_high = ptx::first_four_bits(high);
  row.fours[0][i] = ptx::to_e4m3x4(first_low, first_high);
  row.fours[1][i] = ptx::to_e4m3x4(__hsub2(low, first_low), __hsub2(high, first_high));
}

template <int kRow, int kFrom = 0, int kTo = kRowValues, int kTerms>
__device__ __forceinline__ void exponentials(const float (&s)[ptx::kAccumulators], const RowState& state, float scale,
                                             RowProbabilities<kTerms>& row) {
  const float bias = kProbabilityScaleLog2 - state.reference;
  if constexpr (kFrom == 0) row.sum = row.most = 0.0f;
#pragma unroll
  for (int i = kFrom; i < kTo; i += 4) {
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = ptx::exp2_approx(fmaf(s[value_index<kRow>(i + j)], scale, bias));
    round_four(p, i / 4, row);
    const float four = (p[0] + p[1]) + (p[2] + p[3]);
    row.most = fmaxf(row.most, four);
    row.sum += four;
  }
}

// Raises the row's reference to what the page holds, and rescales to it what the row has gathered in `o` and in its sum. A row's first
// page always comes here.
template <int kRow>
__device__ __forceinline__ void raise_reference(const float (&s)[ptx::kAccumulators], RowState& state, float scale,
                                                float (&o)[ptx::kAccumulators]) {
  float most = kMasked;
#pragma unroll
  for (int i = 0; i < kRowValues; ++i) most = fmaxf(most, s[value_index<kRow>(i)]);
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
  const float reference = fmaxf(state.reference, most + fminf(fabsf(most) * kReferenceRoundUp, kMostRoundUp));
  const float correction = ptx::exp2_approx(state.reference - reference);
  state.sum *= correction;
  state.reference = reference;
#pragma unroll
  for (int i = 0; i < kRowValues; ++i) o[value_index<kRow>(i)] *= correction;
}

// Takes a page's probabilities over, after raising the reference and computing them again when they could have saturated. No wgmma may
// have `o` in flight.
template <int kRow, int kTerms>
__device__ __forceinline__ void accept_row(const float (&s)[ptx::kAccumulators], RowState& state, float scale,
                                           float (&o)[ptx::kAccumulators], RowProbabilities<kTerms>& row) {
  if (__any_sync(~0u, row.most > kE4m3Max)) {
    raise_reference<kRow>(s, state, scale, o);
    exponentials<kRow>(s, state, scale, row);
  }
  state.sum += row.sum;
}

// Puts a row's probabilities in their place: its half of the A fragments of the page's k32 steps, in the token order of transpose_v.
// Written where the program says so, see ptx::pin_registers.
template <int kRow, int kTerms>
__device__ __forceinline__ void to_fragments(const RowProbabilities<kTerms>& row, uint32_t (&fragments)[kTerms][kSteps][4]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      asm volatile("mov.b32 %0, %2;\nmov.b32 %1, %3;"
                   : "=r"(fragments[term][step][kRow]), "=r"(fragments[term][step][kRow + 2])
                   : "r"(row.fours[term][2 * step]), "r"(row.fours[term][2 * step + 1]));
}

// The same of a query that did not pick the page.
template <int kRow, int kTerms>
__device__ __forceinline__ void clear_fragments(uint32_t (&fragments)[kTerms][kSteps][4]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      asm volatile("mov.b32 %0, 0;\nmov.b32 %1, 0;" : "=r"(fragments[term][step][kRow]), "=r"(fragments[term][step][kRow + 2]));
}

// A warp's softmax of one page in two parts: only the first may run while a P V is in flight.
template <int kTerms>
struct PageSoftmax {
  bool member[RowTile::kRowsPerThread];    // by row of the pair: its query picked the page
  int last_key[RowTile::kRowsPerThread];   // and sees the page up to here
  RowProbabilities<kTerms> row;

  // `members`: bit j of the page's members among the tile's queries; `first_token`: the page's position.
  __device__ __forceinline__ PageSoftmax(uint32_t members, int first_token, const int (&limit)[RowTile::kRowsPerThread], int warp) {
#pragma unroll
    for (int r = 0; r < RowTile::kRowsPerThread; ++r) {
      member[r] = (members >> RowTile::query_of(warp, r)) & 1;
      last_key[r] = limit[r] - first_token;
    }
  }

  template <int kRow, int kFrom = 0, int kTo = kRowValues>
  __device__ __forceinline__ void mask_and_exponentiate(float (&s)[ptx::kAccumulators], const RowState (&state)[2],
                                                        const float (&scale)[2], int lane) {
    if (last_key[kRow] < RowTile::kPageSize - 1) mask_future_keys<kRow, kTerms, kFrom, kTo>(s, last_key[kRow], lane);
    exponentials<kRow, kFrom, kTo>(s, state[kRow], scale[kRow], row);
  }

  // Its part that needs the logits kFrom to kTo - 1 of each row only; the parts in ascending order.
  template <int kFrom = 0, int kTo = kRowValues>
  __device__ __forceinline__ void begin(float (&s)[ptx::kAccumulators], const RowState (&state)[2], const float (&scale)[2], int lane) {
    if (member[0]) mask_and_exponentiate<0, kFrom, kTo>(s, state, scale, lane);
    else if (member[1]) mask_and_exponentiate<1, kFrom, kTo>(s, state, scale, lane);
  }

  __device__ __forceinline__ void finish(float (&s)[ptx::kAccumulators], RowState (&state)[2], const float (&scale)[2],
                                         float (&o)[ptx::kAccumulators], uint32_t (&fragments)[kTerms][kSteps][4], int lane) {
    if (member[0]) {
      accept_row<0>(s, state[0], scale[0], o, row);
      to_fragments<0>(row, fragments);
      if (member[1]) mask_and_exponentiate<1>(s, state, scale, lane);
    } else {
      clear_fragments<0>(fragments);
    }
    if (member[1]) {
      accept_row<1>(s, state[1], scale[1], o, row);
      to_fragments<1>(row, fragments);
    } else {
      clear_fragments<1>(fragments);
    }
  }
};

// Issues S = Q K^T of one page. The caller has fenced; it commits.
__device__ __forceinline__ void issue_logits(float (&logits)[ptx::kAccumulators], uint64_t q_descriptor, uint64_t k_descriptor) {
  ptx::wgmma_m64n128k32_ss<false>(logits, q_descriptor, k_descriptor);
#pragma unroll
  for (int step = 1; step < RowTile::kHeadDim / 32; ++step)
    ptx::wgmma_m64n128k32_ss<true>(logits, q_descriptor + step * ptx::kDescriptorStepK32, k_descriptor + step * ptx::kDescriptorStepK32);
}

// Issues O += P V of one page. The caller has fenced; it commits.
__device__ __forceinline__ void issue_values(float (&o)[ptx::kAccumulators], const uint32_t (&fragments)[1][kSteps][4],
                                             uint64_t vt_descriptor) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    ptx::wgmma_m64n128k32_rs(o, fragments[0][step], vt_descriptor + step * ptx::kDescriptorStepK32);
}

// Products of two terms go in halves of 64 columns, each a batch of its own into half of the accumulators: keys of S = Q K^T, dimensions of
// P V, which starts from zero. The last, smallest term goes first: the tensor cores cut every product and sum 13 bits behind the leading one
// of the largest, and it would lose to the others' size. The callers have fenced; they commit. Q's terms lie kQBytes apart.
constexpr int kHalf = ptx::kAccumulators / 2;
constexpr uint64_t kHalfTile = RowTile::kTileBytes / 2 >> 4;  // of K or V^T, in descriptor units

template <int kTerms, int kFirst>
__device__ __forceinline__ void issue_half_of_logits(float (&logits)[ptx::kAccumulators], uint64_t q_descriptor, uint64_t k_descriptor) {
  constexpr int kQSteps = RowTile::kHeadDim / 32;
  constexpr uint64_t kTermStep = RowTile::kQBytes >> 4;
  const uint64_t k = k_descriptor + kFirst / kHalf * kHalfTile;
  ptx::wgmma_m64n64k32_ss<false, kFirst>(logits, q_descriptor + (kTerms - 1) * kTermStep, k);
#pragma unroll
  for (int i = 1; i < kTerms * kQSteps; ++i) {
    const int term = kTerms - 1 - i / kQSteps, step = i % kQSteps;
    ptx::wgmma_m64n64k32_ss<true, kFirst>(logits, q_descriptor + term * kTermStep + step * ptx::kDescriptorStepK32,
                                          k + step * ptx::kDescriptorStepK32);
  }
}

template <int kFirst, int kTerms>
__device__ __forceinline__ void issue_half_of_values(float (&sums)[ptx::kAccumulators], const uint32_t (&fragments)[kTerms][kSteps][4],
                                                     uint64_t vt_descriptor) {
  const uint64_t vt = vt_descriptor + kFirst / kHalf * kHalfTile;
  ptx::wgmma_m64n64k32_rs<false, kFirst>(sums, fragments[kTerms - 1][0], vt);
#pragma unroll
  for (int i = 1; i < kTerms * kSteps; ++i) {
    const int term = kTerms - 1 - i / kSteps, step = i % kSteps;
    ptx::wgmma_m64n64k32_rs<true, kFirst>(sums, fragments[term][step], vt + step * ptx::kDescriptorStepK32);
  }
}

template <int kFirst>
__device__ __forceinline__ void add_half(const float (&sums)[ptx::kAccumulators], float (&o)[ptx::kAccumulators]) {
#pragma unroll
  for (int i = kFirst; i < kFirst + kHalf; ++i) o[i] += sums[i];
}

// Normalises a warp's rows and writes them to their queries' rows of the output; a query that saw nothing gets zeros, an absent one
// (< 0) nothing.
__device__ __forceinline__ void write_rows(const UnionAttentionParams& p, const float (&o)[ptx::kAccumulators],
                                           const RowState (&state)[2], const int (&query)[2], int kv_head, int warp, int lane) {
  const float v_scale = p.v_scale * (p.v_scale_device ? *p.v_scale_device : 1.0f);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = RowTile::kHeadsPerWarp * (warp % 2) + (lane >> 2);
    float sum = state[r].sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (query[r] < 0 || head >= p.heads) continue;
    const float norm = sum > 0.0f ? v_scale / sum : 0.0f;
    __nv_bfloat16* out = p.out + query[r] * p.out_token_stride + (kv_head * p.heads + head) * p.out_head_stride + 4 * (lane & 3);
#pragma unroll
    for (int block = 0; block < RowTile::kHeadDim / 16; ++block) {  // dims 16 block + 4q + {0, 1, 2, 3}
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

}  // namespace pw
