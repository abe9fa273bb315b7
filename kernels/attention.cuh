// What the attention kernels share: parameters, numeric constants, and the pieces of one warpgroup's work on 64 rows (4 queries x 16
// heads, or 8 x 8): quantising Q, transposing V, softmax page by page, writing the result, and the tensor maps of the caches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common.cuh"
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
  const void* masks;       // [kv_heads, groups, max_union] uint8, int32 in groups of more than 8
  const int32_t* counts;   // [kv_heads, groups]
  const int32_t* queries;  // [kv_heads, groups, group_size]
  const int32_t* limits;   // [kv_heads, groups, group_size]
  int heads;  // query heads per KV head, 1 to RowTile::kMostHeads
  int groups;
  int max_union;
  float softmax_scale_log2;  // sm_scale * k_scale * log2(e)
  float v_scale;
  const float* k_scale_device;  // optional further factors read on the device (per-tensor scales kept there)
  const float* v_scale_device;
  // stream.cuh only
  int32_t* queue;              // [2] groups drawn, CTAs done; zero between launches
  const int32_t* order;        // [kv_heads * groups] in which groups are drawn; null: as they are numbered (neighbours share pages in L2)
  const uint8_t* value_tiles;  // [kv_heads, pool_pages] tiles of V^T (value_tiles.cuh)
  int pool_pages;
};

// The tile every attention kernel here is built for: one warpgroup's 64 rows, a row for a query and head.
struct RowTile {
  static constexpr int kHeadDim = 128;
  static constexpr int kPageSize = 128;
  static constexpr int kMostHeads = 16;  // query heads per KV head
  static constexpr int kRows = 64;       // one wgmma M64 tile
  static constexpr int kThreads = 128;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kTileBytes = kPageSize * kHeadDim;  // one page of K or of V of one KV head, E4M3
  static constexpr int kQBytes = kRows * kHeadDim;
  static constexpr int kRowsPerThread = 2;  // an accumulator tile gives a thread parts of rows g and g + 8 of its warp
};

// How a tile's rows are dealt out: 4 queries x 16 heads, or 8 x 8. A warp has eight heads of two queries: rows 16w + 8r + 0 to 7 are those of
// query query_of(w, r), from head first_head(w) on; of 16 heads two warps have a half each. When one of the two queries picked a page, its
// warps are done in half the time; and the two are not neighbours in the group's order, which pick together most often. Rows of heads that
// there are not are zeros that nobody writes. (Sparing half of the warps their softmax, with 8 heads in a tile for 16, won 1 %, and the test
// for it cost all others more.)
template <int kQueries_>
struct TileRows {
  static constexpr int kQueries = kQueries_;
  static constexpr int kHeads = RowTile::kRows / kQueries;
  static constexpr int kHeadsPerWarp = 8;
  static constexpr int kWarpsPerPair = kHeads / kHeadsPerWarp;
  static constexpr int kPairs = kQueries / 2;

  __host__ __device__ static constexpr int query_of(int warp, int r) { return warp / kWarpsPerPair + kPairs * r; }
  __host__ __device__ static constexpr int first_head(int warp) { return kHeadsPerWarp * (warp % kWarpsPerPair); }
  __host__ __device__ static constexpr int row_of(int query, int head) {
    return 16 * (kWarpsPerPair * (query % kPairs) + head / kHeadsPerWarp) + 8 * (query / kPairs) + head % kHeadsPerWarp;
  }
  static_assert(kHeads * kQueries == RowTile::kRows && kWarpsPerPair * kPairs == RowTile::kWarps, "whole warps");
};

// What Q, K, P and V are multiplied as. A block is the part of a page whose logits are computed at a time; kBlockSteps multiplications take its
// P V along its tokens.
template <class Math>
struct MathSizes {
  static constexpr int kBlocksPerPage = RowTile::kPageSize / Math::kBlockTokens;
  static constexpr int kLogits = RowTile::kRows * Math::kBlockTokens / RowTile::kThreads;  // of a block, in a thread's registers
  static constexpr int kRowLogits = kLogits / RowTile::kRowsPerThread;
};
constexpr int kBlockSteps = 4;

// kTerms: E4M3 values whose sum stands for one value of Q or P; 1 is precision fp8, 2 is precision high. K and V are E4M3.
template <int kTerms_>
struct E4m3Math : MathSizes<E4m3Math<kTerms_>> {
  static constexpr bool kBf16 = false;
  static constexpr int kTerms = kTerms_;
  static constexpr int kBlockTokens = 32 * kBlockSteps;
  static constexpr int kQBytes = kTerms * RowTile::kQBytes;
};

// All in BF16. A block of K or of V is as many bytes as a page in E4M3.
struct Bf16Math : MathSizes<Bf16Math> {
  static constexpr bool kBf16 = true;
  static constexpr int kTerms = 1;
  static constexpr int kBlockTokens = 16 * kBlockSteps;
  static constexpr int kPanelDims = 64;                                // 128 bytes of a row: what one swizzled tile holds
  static constexpr int kPanelBytes = 128 * kBlockTokens;               // of K, of V and, having as many rows, of Q
  static constexpr int kPanels = RowTile::kHeadDim / kPanelDims;
  static constexpr int kQBytes = kPanels * kPanelBytes;
  static_assert(kBlockTokens == RowTile::kRows && kPanels * kPanelBytes == RowTile::kTileBytes);
};

// Probabilities are 2^(logit - reference + kProbabilityScaleLog2), summed in fours. While no logit exceeds the row's reference such a
// sum is at most 4 x 2^6 = 256; while it is at most E4M3's largest value, 448, none of the four saturates. So sums that softmax
// needs anyway say when the reference must be raised, and no maximum of the logits is looked for before.
constexpr float kProbabilityScaleLog2 = 6.0f;
constexpr float kE4m3Max = 448.0f;
// Finite stand-in for minus infinity: a row that has seen nothing yet, and keys behind a query's limit. No NaN can form. (That, and the
// largest scale below, is of E4M3 caches, and of BF16 caches whose keys are below some 1e25.)
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
  static_assert(kLinesPerHead * RowTile::kMostHeads == 32, "a line a lane");
  const int head = lane / kLinesPerHead;
  if (query < 0 || head >= p.heads) return;
  ptx::prefetch_to_l2(p.q + query * p.q_token_stride + (kv_head * p.heads + head) * p.q_head_stride + lane % kLinesPerHead * kLineElements);
}

// Quantises the heads of one query, number `place` of the tile, to E4M3 rows of the Q tile and stores each row's softmax scale. Run
// by a warp, eight lanes a row. `query` < 0, or heads that there are not: zeros. The candidates' errors are summed in half precision, which
// is as good for choosing. With two terms a second tile behind the first takes what the first leaves of every value; the scale is a power
// of two then, so that the two hold all eight bits of a BF16 value. Rows that stay BF16 keep their values, times a power of two, so that huge
// ones give no infinity.
template <class Math, class Rows>
__device__ __forceinline__ void quantise_query(const UnionAttentionParams& p, uint8_t* q_tile, float* row_scale, int query,
                                               int kv_head, int place, int lane, float softmax_scale_log2) {
  constexpr int kTerms = Math::kTerms;
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
  for (int head = lane / kLanesPerRow; head < Rows::kHeads; head += kRowsPerStep) {
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
    if constexpr (kTerms == 1 && !Math::kBf16) {
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
    if constexpr (kTerms > 1 || Math::kBf16) {
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
    const uint32_t row = Rows::row_of(place, head);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int vector = v * kLanesPerRow + part;
      if constexpr (Math::kBf16) {
        const __nv_bfloat162 factors = __float2bfloat162_rn(chosen);
        __nv_bfloat162 scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) scaled[i] = __hmul2(pairs[4 * v + i], factors);
        constexpr int kVectorsPerPanel = Bf16Math::kPanelDims / 8;
        *reinterpret_cast<uint4*>(q_tile + vector / kVectorsPerPanel * Bf16Math::kPanelBytes + swizzled_offset(row, vector % kVectorsPerPanel)) =
            *reinterpret_cast<const uint4*>(scaled);
      } else {
#pragma unroll
        for (int t = 0; t < kTerms; ++t)
          *reinterpret_cast<uint2*>(q_tile + t * RowTile::kQBytes + swizzled_offset(row, vector >> 1) + (vector & 1) * 8) =
              make_uint2(term(t, 2 * v), term(t, 2 * v + 1));
      }
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

// The functions below work on row kRow of the thread's pair: its logits of a block (32 of a page in E4M3) are s[4j + 2 kRow] and
// s[4j + 2 kRow + 1], keys 8j + 2q and 8j + 2q + 1.
constexpr int kRowValues = ptx::kAccumulators / RowTile::kRowsPerThread;  // of O

template <int kRow>
__device__ __forceinline__ constexpr int value_index(int i) {
  return 4 * (i / 2) + 2 * kRow + i % 2;
}

// Masks the keys behind `last_key` (in the block). With one term the thread's first key is added to 32 constants, sums that the compiler
// keeps in registers; two terms of P leave no room for them, so it is taken from `last_key` once.
template <int kRow, class Math, int kFrom, int kTo>
__device__ __forceinline__ void mask_future_keys(float (&s)[Math::kLogits], int last_key, int lane) {
  const int own = 2 * (lane & 3);
  const int first = Math::kTerms == 1 ? own : 0, last = Math::kTerms == 1 ? last_key : last_key - own;
#pragma unroll
  for (int i = kFrom; i < kTo; ++i)
    if (8 * (i / 2) + first + i % 2 > last) s[value_index<kRow>(i)] = kMasked;
}

// A row's probabilities of a block as sums of E4M3 values, four to a register, or in BF16, two to a register; the sum before rounding and the
// largest sum of four.
template <class Math>
struct RowProbabilities {
  uint32_t packed[Math::kTerms][2 * kBlockSteps];
  float sum, most;
};

// Rounds four probabilities to E4M3 or BF16, or splits them into two terms of E4M3: the first four bits of each, and what is left of it.
__device__ __forceinline__ void round_four(const float (&p)[4], int i, RowProbabilities<E4m3Math<1>>& row) {
  row.packed[0][i] = ptx::to_e4m3x4(p[0], p[1], p[2], p[3]);
}

__device__ __forceinline__ void round_four(const float (&p)[4], int i, RowProbabilities<Bf16Math>& row) {
  row.packed[0][2 * i] = ptx::to_bf16x2(p[0], p[1]);
  row.packed[0][2 * i + 1] = ptx::to_bf16x2(p[2], p[3]);
}

__device__ __forceinline__ void round_four(const float (&p)[4], int i, RowProbabilities<E4m3Math<2>>& row) {
  const __half2 low = ptx::to_half2(p[0], p[1]), high = ptx::to_half2(p[2], p[3]);
  const __half2 first_low = ptx::first_four_bits(low), first_high = ptx::first_four_bits(high);
  row.packed[0][i] = ptx::to_e4m3x4(first_low, first_high);
  row.packed[1][i] = ptx::to_e4m3x4(__hsub2(low, first_low), __hsub2(high, first_high));
}

template <int kRow, class Math, int kFrom = 0, int kTo = Math::kRowLogits>
__device__ __forceinline__ void exponentials(const float (&s)[Math::kLogits], const RowState& state, float scale,
                                             RowProbabilities<Math>& row) {
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

// Raises the row's reference to what the block holds, and rescales to it what the row has gathered in `o` and in its sum. A row's first
// page always comes here.
template <int kRow, int kLogits>
__device__ __forceinline__ void raise_reference(const float (&s)[kLogits], RowState& state, float scale, float (&o)[ptx::kAccumulators]) {
  float most = kMasked;
#pragma unroll
  for (int i = 0; i < kLogits / RowTile::kRowsPerThread; ++i) most = fmaxf(most, s[value_index<kRow>(i)]);
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
  const float reference = fmaxf(state.reference, most + fminf(fabsf(most) * kReferenceRoundUp, kMostRoundUp));
  const float correction = ptx::exp2_approx(state.reference - reference);
  state.sum *= correction;
  state.reference = reference;
#pragma unroll
  for (int i = 0; i < kRowValues; ++i) o[value_index<kRow>(i)] *= correction;
}

// Takes a block's probabilities over, after raising the reference and computing them again when they could have saturated. No wgmma may
// have `o` in flight.
template <int kRow, class Math>
__device__ __forceinline__ void accept_row(const float (&s)[Math::kLogits], RowState& state, float scale,
                                           float (&o)[ptx::kAccumulators], RowProbabilities<Math>& row) {
  if (__any_sync(~0u, row.most > kE4m3Max)) {
    raise_reference<kRow>(s, state, scale, o);
    exponentials<kRow, Math>(s, state, scale, row);
  }
  state.sum += row.sum;
}

// Puts a row's probabilities in their place: its half of the A fragments of the block's steps, of E4M3 in the token order of transpose_v.
// Written where the program says so, see ptx::pin_registers.
template <int kRow, class Math>
__device__ __forceinline__ void to_fragments(const RowProbabilities<Math>& row, uint32_t (&fragments)[Math::kTerms][kBlockSteps][4]) {
#pragma unroll
  for (int term = 0; term < Math::kTerms; ++term)
#pragma unroll
    for (int step = 0; step < kBlockSteps; ++step)
      asm volatile("mov.b32 %0, %2;\nmov.b32 %1, %3;"
                   : "=r"(fragments[term][step][kRow]), "=r"(fragments[term][step][kRow + 2])
                   : "r"(row.packed[term][2 * step]), "r"(row.packed[term][2 * step + 1]));
}

// The same of a query that did not pick the page.
template <int kRow, int kTerms>
__device__ __forceinline__ void clear_fragments(uint32_t (&fragments)[kTerms][kBlockSteps][4]) {
#pragma unroll
  for (int term = 0; term < kTerms; ++term)
#pragma unroll
    for (int step = 0; step < kBlockSteps; ++step)
      asm volatile("mov.b32 %0, 0;\nmov.b32 %1, 0;" : "=r"(fragments[term][step][kRow]), "=r"(fragments[term][step][kRow + 2]));
}

// A warp's softmax of one block in two parts: only the first may run while a P V is in flight.
template <class Math, class Rows>
struct BlockSoftmax {
  bool member[RowTile::kRowsPerThread];    // by row of the pair: its query picked the page, and sees some of the block
  int last_key[RowTile::kRowsPerThread];   // and sees the block up to here
  RowProbabilities<Math> row;

  // `members`: bit j of the block's members among the tile's queries; `first_token`: the block's position.
  __device__ __forceinline__ BlockSoftmax(uint32_t members, int first_token, const int (&limit)[RowTile::kRowsPerThread], int warp) {
#pragma unroll
    for (int r = 0; r < RowTile::kRowsPerThread; ++r) {
      member[r] = (members >> Rows::query_of(warp, r)) & 1;
      last_key[r] = limit[r] - first_token;
    }
  }

  template <int kRow, int kFrom = 0, int kTo = Math::kRowLogits>
  __device__ __forceinline__ void mask_and_exponentiate(float (&s)[Math::kLogits], const RowState (&state)[2], const float (&scale)[2],
                                                        int lane) {
    if (last_key[kRow] < Math::kBlockTokens - 1) mask_future_keys<kRow, Math, kFrom, kTo>(s, last_key[kRow], lane);
    exponentials<kRow, Math, kFrom, kTo>(s, state[kRow], scale[kRow], row);
  }

  // Its part that needs the logits kFrom to kTo - 1 of each row only; the parts in ascending order.
  template <int kFrom = 0, int kTo = Math::kRowLogits>
  __device__ __forceinline__ void begin(float (&s)[Math::kLogits], const RowState (&state)[2], const float (&scale)[2], int lane) {
    if (member[0]) mask_and_exponentiate<0, kFrom, kTo>(s, state, scale, lane);
    else if (member[1]) mask_and_exponentiate<1, kFrom, kTo>(s, state, scale, lane);
  }

  __device__ __forceinline__ void finish(float (&s)[Math::kLogits], RowState (&state)[2], const float (&scale)[2],
                                         float (&o)[ptx::kAccumulators], uint32_t (&fragments)[Math::kTerms][kBlockSteps][4], int lane) {
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

// Issues S = Q K^T of one block, a page in E4M3 or half of one in BF16 (told apart by their logits). The caller has fenced; it commits.
__device__ __forceinline__ void issue_logits(float (&logits)[ptx::kAccumulators], uint64_t q_descriptor, uint64_t k_descriptor) {
  ptx::wgmma_m64n128k32_ss<false>(logits, q_descriptor, k_descriptor);
#pragma unroll
  for (int step = 1; step < RowTile::kHeadDim / 32; ++step)
    ptx::wgmma_m64n128k32_ss<true>(logits, q_descriptor + step * ptx::kDescriptorStep, k_descriptor + step * ptx::kDescriptorStep);
}

__device__ __forceinline__ void issue_logits(float (&logits)[Bf16Math::kLogits], uint64_t q_descriptor, uint64_t k_descriptor) {
  constexpr int kStepsPerPanel = 128 / 32;  // bytes
  constexpr uint64_t kPanelStep = Bf16Math::kPanelBytes >> 4;
  ptx::wgmma_m64n64k16_ss<false>(logits, q_descriptor, k_descriptor);
#pragma unroll
  for (int step = 1; step < Bf16Math::kPanels * kStepsPerPanel; ++step) {
    const uint64_t at = step / kStepsPerPanel * kPanelStep + step % kStepsPerPanel * ptx::kDescriptorStep;
    ptx::wgmma_m64n64k16_ss<true>(logits, q_descriptor + at, k_descriptor + at);
  }
}

// Issues O += P V of one block: `v` is V^T of a page in E4M3, V of half a page in BF16. The caller has fenced; it commits.
template <class Math>
__device__ __forceinline__ void issue_values(float (&o)[ptx::kAccumulators], const uint32_t (&fragments)[1][kBlockSteps][4], const uint8_t* v) {
  if constexpr (Math::kBf16) {
    constexpr uint64_t kStep = Bf16Math::kBlockTokens / kBlockSteps * 128 >> 4;  // tokens are rows of 128 bytes
    const uint64_t descriptor = ptx::wgmma_descriptor_n_major<Bf16Math::kPanelBytes>(v);
#pragma unroll
    for (int step = 0; step < kBlockSteps; ++step) ptx::wgmma_m64n128k16_rs(o, fragments[0][step], descriptor + step * kStep);
  } else {
    const uint64_t descriptor = ptx::wgmma_descriptor(v);
#pragma unroll
    for (int step = 0; step < kBlockSteps; ++step)
      ptx::wgmma_m64n128k32_rs(o, fragments[0][step], descriptor + step * ptx::kDescriptorStep);
  }
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
    ptx::wgmma_m64n64k32_ss<true, kFirst>(logits, q_descriptor + term * kTermStep + step * ptx::kDescriptorStep,
                                          k + step * ptx::kDescriptorStep);
  }
}

template <int kFirst, int kTerms>
__device__ __forceinline__ void issue_half_of_values(float (&sums)[ptx::kAccumulators], const uint32_t (&fragments)[kTerms][kBlockSteps][4],
                                                     uint64_t vt_descriptor) {
  const uint64_t vt = vt_descriptor + kFirst / kHalf * kHalfTile;
  ptx::wgmma_m64n64k32_rs<false, kFirst>(sums, fragments[kTerms - 1][0], vt);
#pragma unroll
  for (int i = 1; i < kTerms * kBlockSteps; ++i) {
    const int term = kTerms - 1 - i / kBlockSteps, step = i % kBlockSteps;
    ptx::wgmma_m64n64k32_rs<true, kFirst>(sums, fragments[term][step], vt + step * ptx::kDescriptorStep);
  }
}

template <int kFirst>
__device__ __forceinline__ void add_half(const float (&sums)[ptx::kAccumulators], float (&o)[ptx::kAccumulators]) {
#pragma unroll
  for (int i = kFirst; i < kFirst + kHalf; ++i) o[i] += sums[i];
}

// Normalises a warp's rows and writes them to their queries' rows of the output; a query that saw nothing gets zeros, an absent one
// (< 0) nothing.
template <class Math, class Rows>
__device__ __forceinline__ void write_rows(const UnionAttentionParams& p, const float (&o)[ptx::kAccumulators],
                                           const RowState (&state)[2], const int (&query)[2], int kv_head, int warp, int lane) {
  const float v_scale = p.v_scale * (p.v_scale_device ? *p.v_scale_device : 1.0f);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = Rows::first_head(warp) + (lane >> 2);
    float sum = state[r].sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const uint32_t writers = __ballot_sync(~0u, head < p.heads);
    if (query[r] < 0 || head >= p.heads) continue;
    const float norm = sum > 0.0f ? v_scale / sum : 0.0f;
    __nv_bfloat16* out = p.out + query[r] * p.out_token_stride + (kv_head * p.heads + head) * p.out_head_stride +
                         (Math::kBf16 ? 8 * (lane & 1) + 2 * (lane & 2) : 4 * (lane & 3));
#pragma unroll
    for (int block = 0; block < RowTile::kHeadDim / 16; ++block) {  // dims 16 block + four of each lane's
      const float* even = o + 8 * block + 2 * r;
      const float* odd = even + 4;
      uint2 packed;
      if constexpr (Math::kBf16) {
        // The accumulators are dims 16 block + 2q, + 1 and those 8 behind them: lanes q and q ^ 1 trade, so that each has four in a row.
        const bool second = lane & 1;
        const uint32_t low = ptx::to_bf16x2(even[0] * norm, even[1] * norm), high = ptx::to_bf16x2(odd[0] * norm, odd[1] * norm);
        const uint32_t theirs = __shfl_xor_sync(writers, second ? low : high, 1);
        packed = second ? make_uint2(theirs, high) : make_uint2(low, theirs);
      } else {
        packed = make_uint2(ptx::to_bf16x2(even[0] * norm, odd[0] * norm), ptx::to_bf16x2(even[1] * norm, odd[1] * norm));
      }
      *reinterpret_cast<uint2*>(out + 16 * block) = packed;
    }
  }
}

// ---------------------------------------------------------------- Host

// A cache [slots, kv_heads, 128] as a tensor map with boxes of `tokens` rows of one head, strides in elements. E4M3: dimensions dim, head, slot.
// BF16: dim in the panel, slot, panel, head, so that a box lies panel by panel, each as wide as the swizzle.
inline CUresult encode_cache_map(CUtensorMap* map, const void* cache, bool bf16, int64_t slots, int kv_heads, int64_t slot_stride,
                                 int64_t head_stride, int tokens) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode encode = [] {  // libcuda is not linked, so that the library loads on a machine without a driver
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  if (encode == nullptr) return CUDA_ERROR_NOT_FOUND;
  auto encode_as = [&](CUtensorMapDataType type, int rank, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box) {
    const cuuint32_t element_strides[4] = {1, 1, 1, 1};
    return encode(map, type, rank, const_cast<void*>(cache), dims, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  const cuuint64_t heads = kv_heads, rows = slots, row_stride = slot_stride, column_stride = head_stride;
  const cuuint32_t box_rows = tokens;
  if (bf16) {
    constexpr cuuint64_t kBytes = sizeof(__nv_bfloat16);
    const cuuint64_t dims[4] = {Bf16Math::kPanelDims, rows, Bf16Math::kPanels, heads};
    const cuuint64_t strides[3] = {row_stride * kBytes, Bf16Math::kPanelDims * kBytes, column_stride * kBytes};
    const cuuint32_t box[4] = {Bf16Math::kPanelDims, box_rows, Bf16Math::kPanels, 1};
    return encode_as(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, dims, strides, box);
  }
  const cuuint64_t dims[3] = {RowTile::kHeadDim, heads, rows};
  const cuuint64_t strides[2] = {column_stride, row_stride};
  const cuuint32_t box[3] = {RowTile::kHeadDim, 1, box_rows};
  return encode_as(CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, dims, strides, box);
}

}  // namespace pw
