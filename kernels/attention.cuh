// What the attention kernels share: parameters, numeric constants, and the pieces of one warpgroup's work on 64 rows (4 queries x 16
// heads): quantising Q, transposing V, the running softmax, writing the result, and the tensor maps of the caches.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
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
  // stream.cuh only
  int32_t* queue;              // [2] groups drawn, CTAs done; zero between launches
  const uint8_t* value_tiles;  // [kv_heads, pool_pages] tiles of V^T (value_tiles.cuh)
  int pool_pages;
};

// The tile every attention kernel here is built for: one warpgroup, warp w holds the 16 heads of query w.
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
  static_assert(kWarps == kQueries, "warp w holds the heads of query w");
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

// ---------------------------------------------------------------- Pieces

// Chunk (16 bytes) of a row under the 128-byte swizzle.
__device__ __forceinline__ uint32_t swizzled_offset(uint32_t row, uint32_t chunk) { return row * 128 + ((chunk ^ (row & 7)) << 4); }

// Quantises the 16 heads of one query (one warp) to E4M3 rows 16w .. 16w + 15 of the Q tile and stores each row's softmax
// scale. `query` < 0: zeros.
__device__ __forceinline__ void quantise_query(const UnionAttentionParams& p, uint8_t* q_tile, float* row_scale, int query,
                                               int kv_head, int warp, int lane, float softmax_scale_log2) {
  constexpr int kHeadsPerStep = 2;  // 16 lanes x 16 bytes are one head's 128 BF16 values
  constexpr int kSteps = RowTile::kHeadsPerKvHead / kHeadsPerStep;
  const int half = lane >> 4, part = lane & 15;
  uint4 raw[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int head = step * kHeadsPerStep + half;
    raw[step] = make_uint4(0, 0, 0, 0);
    if (query >= 0) {
      const __nv_bfloat16* row = p.q + query * p.q_token_stride + (kv_head * RowTile::kHeadsPerKvHead + head) * p.q_head_stride;
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
    const uint32_t row = warp * RowTile::kHeadsPerKvHead + step * kHeadsPerStep + half;
    uint2 packed;
    packed.x = ptx::to_e4m3x4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse);
    packed.y = ptx::to_e4m3x4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse);
    *reinterpret_cast<uint2*>(q_tile + swizzled_offset(row, part >> 1) + (part & 1) * 8) = packed;
    if (part == 0) row_scale[row] = fminf(amax / kE4m3Max * softmax_scale_log2, kLargestRowScale);
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

// Softmax of the two rows (heads g and g + 8 of the warp's query) that a thread holds parts of.
struct RowState {
  float reference = kMasked;  // logits (base 2, scaled) exceed it by 2.8 at most
  float sum = 0.0f;           // this thread's part, scaled by 2^kProbabilityScaleLog2
};

constexpr int kHalfPage = RowTile::kPageSize / 2;
constexpr int kHalfSteps = kHalfPage / 32;  // k32 steps of P V
constexpr int kHalfAccumulators = ptx::kAccumulators / 2;

// The functions below work on half a page of a warp's logits: s[kFirst] to s[kFirst + 31], 64 keys. Row r of the thread's pair has
// accumulators 4j + 2r and 4j + 2r + 1, keys 8j + 2q and 8j + 2q + 1.

// Masks the keys behind `last_key` (counted from the half's first).
template <int kFirst, int kCount>
__device__ __forceinline__ void mask_future_keys(float (&s)[kCount], int last_key, int lane) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int key = 8 * j + 2 * (lane & 3);
    if (key > last_key) s[kFirst + 4 * j] = s[kFirst + 4 * j + 2] = kMasked;
    if (key + 1 > last_key) s[kFirst + 4 * j + 1] = s[kFirst + 4 * j + 3] = kMasked;
  }
}

// Probabilities of half a page, row r of the pair in p[r], the sum of each row and the largest sum of four.
struct HalfProbabilities {
  float p[2][16];
  float sum[2];
  float most;
};

template <int kFirst, int kCount>
__device__ __forceinline__ void exponentials(const float (&s)[kCount], const RowState (&state)[2], const float (&scale)[2],
                                             HalfProbabilities& half) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float bias = kProbabilityScaleLog2 - state[r].reference;
#pragma unroll
    for (int i = 0; i < 16; ++i) half.p[r][i] = ptx::exp2_approx(fmaf(s[kFirst + 4 * (i / 2) + 2 * r + i % 2], scale[r], bias));
  }
  // All exponentials are under way before the first is added: woven together, each addition would wait for its operands' latency.
  ptx::pin_registers(half.p[0]);
  ptx::pin_registers(half.p[1]);
  half.most = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float fours[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      fours[i] = (half.p[r][4 * i] + half.p[r][4 * i + 1]) + (half.p[r][4 * i + 2] + half.p[r][4 * i + 3]);
      half.most = fmaxf(half.most, fours[i]);
    }
    half.sum[r] = (fours[0] + fours[1]) + (fours[2] + fours[3]);
  }
}

// Raises the rows' references to what the half page holds, and rescales to them what the rows have gathered in `o` and in their sums.
// A row's first page always comes here. Returns the factors in `correction`.
template <int kFirst, int kCount>
__device__ __forceinline__ void raise_references(const float (&s)[kCount], RowState (&state)[2], const float (&scale)[2],
                                                 float (&o)[ptx::kAccumulators], float (&correction)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = kMasked;
#pragma unroll
    for (int j = 0; j < 8; ++j) most = fmaxf(most, fmaxf(s[kFirst + 4 * j + 2 * r], s[kFirst + 4 * j + 2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale[r];
    const float reference = fmaxf(state[r].reference, fmaf(fabsf(most), kReferenceRoundUp, most));
    correction[r] = ptx::exp2_approx(state[r].reference - reference);
    state[r].sum *= correction[r];
    state[r].reference = reference;
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    o[4 * j] *= correction[0];
    o[4 * j + 1] *= correction[0];
    o[4 * j + 2] *= correction[1];
    o[4 * j + 3] *= correction[1];
  }
}

// Takes over the probabilities of a page's half, after raising the references and computing them again when they could have
// saturated. `earlier` are the fragments of the page's first half when this is the second: they are not in `o` yet. No wgmma may have
// `o` or `earlier` in flight.
template <int kHalf, int kFirst, int kCount>
__device__ __forceinline__ void accept_half(const float (&s)[kCount], RowState (&state)[2], const float (&scale)[2],
                                            float (&o)[ptx::kAccumulators], uint32_t (&earlier)[kHalfSteps][4],
                                            HalfProbabilities& half) {
  if (__any_sync(~0u, half.most > kE4m3Max)) {
    float correction[2];
    raise_references<kFirst>(s, state, scale, o, correction);
    exponentials<kFirst>(s, state, scale, half);
    if constexpr (kHalf == 1) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t factor = ptx::to_half2(correction[r], correction[r]);
#pragma unroll
        for (int step = 0; step < kHalfSteps; ++step) {
          earlier[step][r] = ptx::scale_e4m3x4(earlier[step][r], factor);
          earlier[step][r + 2] = ptx::scale_e4m3x4(earlier[step][r + 2], factor);
        }
      }
    }
  }
  state[0].sum += half.sum[0];
  state[1].sum += half.sum[1];
}

// Rounds a half page's probabilities to E4M3, as the A fragments of two k32 steps in the token order of transpose_v.
__device__ __forceinline__ void to_fragments(const HalfProbabilities& half, uint32_t (&fragments)[kHalfSteps][4]) {
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int step = 0; step < kHalfSteps; ++step) {
      const float* p = half.p[r] + 8 * step;
      fragments[step][r] = ptx::to_e4m3x4(p[0], p[1], p[2], p[3]);
      fragments[step][r + 2] = ptx::to_e4m3x4(p[4], p[5], p[6], p[7]);
    }
}

// The fragments of a query that did not pick the page; written where the program says so, see ptx::pin_registers.
__device__ __forceinline__ void clear_fragments(uint32_t (&fragments)[kHalfSteps][4]) {
#pragma unroll
  for (int f = 0; f < 4 * kHalfSteps; ++f) asm volatile("mov.b32 %0, 0;" : "=r"(fragments[f / 4][f % 4]));
}

// Issues S = Q K^T of one page. The caller has fenced; it commits.
__device__ __forceinline__ void issue_logits(float (&logits)[ptx::kAccumulators], uint64_t q_descriptor, uint64_t k_descriptor) {
  ptx::wgmma_m64n128k32_ss<false>(logits, q_descriptor, k_descriptor);
#pragma unroll
  for (int step = 1; step < RowTile::kHeadDim / 32; ++step)
    ptx::wgmma_m64n128k32_ss<true>(logits, q_descriptor + step * ptx::kDescriptorStepK32, k_descriptor + step * ptx::kDescriptorStepK32);
}

// Issues O += P V of one page, P as the fragments of its two halves. The caller has fenced; it commits.
__device__ __forceinline__ void issue_values(float (&o)[ptx::kAccumulators], const uint32_t (&first)[kHalfSteps][4],
                                             const uint32_t (&second)[kHalfSteps][4], uint64_t vt_descriptor) {
#pragma unroll
  for (int step = 0; step < kHalfSteps; ++step)
    ptx::wgmma_m64n128k32_rs(o, first[step], vt_descriptor + step * ptx::kDescriptorStepK32);
#pragma unroll
  for (int step = 0; step < kHalfSteps; ++step)
    ptx::wgmma_m64n128k32_rs(o, second[step], vt_descriptor + (kHalfSteps + step) * ptx::kDescriptorStepK32);
}

// Normalises a warp's 16 rows and writes them to the query's row of the output; a query that saw nothing gets zeros.
__device__ __forceinline__ void write_query(const UnionAttentionParams& p, const float (&o)[ptx::kAccumulators],
                                            const RowState (&state)[2], int query, int kv_head, int lane) {
  const float v_scale = p.v_scale * (p.v_scale_device ? *p.v_scale_device : 1.0f);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state[r].sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float norm = sum > 0.0f ? v_scale / sum : 0.0f;
    const int head = kv_head * RowTile::kHeadsPerKvHead + (lane >> 2) + 8 * r;
    __nv_bfloat16* out = p.out + query * p.out_token_stride + head * p.out_head_stride + 4 * (lane & 3);
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
