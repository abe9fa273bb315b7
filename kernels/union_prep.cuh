// Union preparation: for each group of up to 8 queries the deduplicated ascending list of the pages they picked, and
// per page the mask of the slots that picked it (bit r: slot r), plus what the attention kernel needs per query and
// page: the last token each slot sees and the physical page, which it also marks for value_tiles.cuh.
//
// One warp per group: the group's 8 x 16 candidates are 128 keys `page << 3 | slot`, four per lane (lane l holds slot
// l / 4). A bitonic sort orders them; the first key of each run of a page gets the page's place in the list by a ballot
// scan; all keys of the run OR their slot's bit into the mask.
//
//   Shared memory            bytes   written by                          read by
//   pages [warps][128]        2048   the lane with a run's first key     the lane that writes the place out
//   masks [warps][128]        2048   every key of the run (atomicOr)     the same
//
//   Timeline of a warp: find the group | load order and lengths | load ids | sort | clear masks, W, place pages and
//   bits, W | load the pages' cache slots | write the whole row (W = __syncwarp). Few warps share an SM, so time is
//   round trips to memory: loads that do not depend on each other are issued together. Whole rows are written, so that
//   nothing of an earlier call is left in the buffers.
//
// At most 40 registers per thread, asserted by tests/kernels/test_compile.py.
#pragma once

#include "common.cuh"

namespace pw {

// ---------------------------------------------------------------- Constants
constexpr int kMaxUnionGroup = 8;  // a mask is one byte
constexpr int kSlotBits = 3;       // of a key
constexpr int kCandidates = kMaxUnionGroup * kMaxTopk;
constexpr int kKeysPerLane = kCandidates / kWarpSize;
constexpr int kLanesPerSlot = kWarpSize / kMaxUnionGroup;
constexpr uint32_t kNoKey = 0xffffffffu;
constexpr int kMaxPages = (1 << (32 - kSlotBits)) - 1;  // page ids below this fit a key
constexpr int kUnionPrepWarps = 4;

static_assert(kKeysPerLane == 4 && kKeysPerLane * kLanesPerSlot == kMaxTopk, "four ids of one query per lane");

// ---------------------------------------------------------------- Types
// The plan's arrays, contiguous, for kv_heads x groups rows. See UnionPlan in pageweaver_sglang/plan.py.
struct PlanPtrs {
  int32_t* pages;    // [kv_heads, groups, max_union] ascending, then -1
  uint8_t* masks;    // [kv_heads, groups, max_union] then 0
  int32_t* counts;   // [kv_heads, groups]
  int32_t* queries;  // [kv_heads, groups, group_size] token row, -1: empty slot
  int32_t* limits;   // [kv_heads, groups, group_size] last token seen, -1: none
  int32_t* slots;    // [kv_heads, groups, max_union] physical page, -1: not to be read; or null
  int32_t* queue;    // [2] cleared for the attention kernel that draws groups from it; or null
  int32_t* marks;    // [kv_heads, num_pool_pages] raised to the tokens that a listed page holds; or null
};

// Where the tokens of a request lie in the KV pool.
struct TokenMap {
  const int32_t* req_to_token;  // [rows, positions] cache slot of (request slot, position), or null
  int64_t req_stride;           // between rows
  int rows, positions;          // of req_to_token: what may be read
  const void* slot_ids;  // [requests] int32 or int64: row of req_to_token
  bool slot_ids_are_int64;
  int num_pool_pages;
};

struct UnionPrepShared {
  int32_t pages[kUnionPrepWarps][kCandidates];
  uint32_t masks[kUnionPrepWarps][kCandidates];
};

// ---------------------------------------------------------------- Functions
__device__ inline void order_pair(uint32_t& low, uint32_t& high, bool ascending) {
  const uint32_t a = min(low, high), b = max(low, high);
  low = ascending ? a : b;
  high = ascending ? b : a;
}

// Sorts the warp's 128 keys ascending; key i is keys[i % 4] of lane i / 4.
__device__ inline void sort_keys(uint32_t (&keys)[kKeysPerLane]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int size = 2; size <= kCandidates; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride >= kKeysPerLane; stride /= 2) {
      const int lanes = stride / kKeysPerLane;
      const bool ascending = (lane * kKeysPerLane & size) == 0;
      const bool keep_min = ((lane & lanes) == 0) == ascending;
#pragma unroll
      for (int i = 0; i < kKeysPerLane; ++i) {
        const uint32_t other = __shfl_xor_sync(kFullWarp, keys[i], lanes);
        keys[i] = keep_min ? min(keys[i], other) : max(keys[i], other);
      }
    }
    if (size >= 4) {
      const bool ascending = (lane * kKeysPerLane & size) == 0;
      order_pair(keys[0], keys[2], ascending);
      order_pair(keys[1], keys[3], ascending);
      order_pair(keys[0], keys[1], ascending);
      order_pair(keys[2], keys[3], ascending);
    } else {  // pairs, in alternating order
      order_pair(keys[0], keys[1], true);
      order_pair(keys[2], keys[3], false);
    }
  }
}

// Cache slot of the first token of a logical page; -1 when it cannot be read.
__device__ inline int first_slot(const TokenMap& map, const int32_t* row, int page, int page_size) {
  const int64_t position = static_cast<int64_t>(page) * page_size;
  return row != nullptr && page >= 0 && position < map.positions ? __ldg(row + position) : -1;
}

// Physical page that starts with cache slot `slot`; -1 when none of the pool does.
__device__ inline int physical_page(const TokenMap& map, int slot, int page_size) {
  const int page = slot / page_size;
  return (slot >= 0) & (page * page_size == slot) & (page < map.num_pool_pages) ? page : -1;
}

// ---------------------------------------------------------------- Kernel
// grid (ceil(groups / 4), kv_heads), block 128
__global__ void __launch_bounds__(kUnionPrepWarps* kWarpSize)
    union_prep_kernel(const int32_t* __restrict__ topk, int64_t head_stride, int64_t row_stride, int k, bool vectors,
                      const int32_t* __restrict__ perm, Lengths lengths, TokenMap map, int window, int per_window,
                      int group_size, int page_size, PlanPtrs plan, int groups, int max_union) {
  PW_SHARED(UnionPrepShared, shared);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group = static_cast<int>(blockIdx.x) * kUnionPrepWarps + warp;
  if (plan.queue != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 2) plan.queue[threadIdx.x] = 0;
  if (group >= groups) return;
  const int64_t head = blockIdx.y;
  const int64_t plan_row = head * groups + group;

  const Location at = locate(lengths, group, [=](int rows) {
    return rows / window * per_window + (rows % window + group_size - 1) / group_size;
  });
  const bool attends = at.request >= 0 && at.request < lengths.requests;
  int first = 0, members = 0;
  if (at.request >= 0) {
    const int window_begin = at.unit / per_window * window;  // rows of the request
    const int group_begin = window_begin + at.unit % per_window * group_size;
    const int window_end = window_begin + min(window, at.end - at.begin - window_begin);
    first = at.begin + group_begin;
    members = min(group_size, window_end - group_begin);
  }
  // These reads need nothing but the request: all are under way before the first result is used.
  const int slot = lane / kLanesPerSlot;  // of this lane's four keys
  int query = -1, sequence = 0, prefix = 0;
  int64_t request_slot = -1;
  // Padding rows belong to nobody, whatever the caller's order says of them.
  if (slot < members) query = perm != nullptr && attends ? perm[head * lengths.tokens + first + slot] : first + slot;
  if (attends) {
    sequence = sequence_length(lengths, at);
    prefix = lengths.prefix_lens[at.request];
    if (plan.slots != nullptr && map.req_to_token != nullptr)
      request_slot = map.slot_ids_are_int64 ? static_cast<const int64_t*>(map.slot_ids)[at.request]
                                            : static_cast<const int32_t*>(map.slot_ids)[at.request];
  }
  if (query < at.begin || query >= at.end) query = -1;  // never read a row that is not the request's own
  int ids[kKeysPerLane] = {-1, -1, -1, -1};
  if (query >= 0)
    load_ids(topk + head * head_stride + query * row_stride, lane % kLanesPerSlot * kKeysPerLane, k, vectors, ids);

  sequence = max(sequence, 0);
  if (lane % kLanesPerSlot == 0 && slot < group_size) {
    const int limit = query >= 0 && attends ? min(prefix + (query - at.begin), sequence - 1) : -1;
    plan.queries[plan_row * group_size + slot] = query;
    plan.limits[plan_row * group_size + slot] = max(limit, -1);
  }
  drop_invalid(min(ceil_div(sequence, page_size), kMaxPages), ids);
  uint32_t keys[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i)
    keys[i] = ids[i] >= 0 ? static_cast<uint32_t>(ids[i]) << kSlotBits | static_cast<uint32_t>(slot) : kNoKey;
  sort_keys(keys);

  // Runs of one page: `place` is the number of run heads before this lane's keys.
  uint32_t previous = __shfl_up_sync(kFullWarp, keys[kKeysPerLane - 1], 1);
  if (lane == 0) previous = kNoKey;
  int place = 0, count = 0;
  bool head_of_run[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const uint32_t before = i == 0 ? previous : keys[i - 1];
    head_of_run[i] = keys[i] != kNoKey && (before == kNoKey || keys[i] >> kSlotBits != before >> kSlotBits);
    const unsigned heads = __ballot_sync(kFullWarp, head_of_run[i]);
    place += __popc(heads & ((1u << lane) - 1));
    count += __popc(heads);
    shared.masks[warp][lane + i * kWarpSize] = 0;
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    if (head_of_run[i]) shared.pages[warp][place++] = static_cast<int32_t>(keys[i] >> kSlotBits);
    if (keys[i] != kNoKey) atomicOr(&shared.masks[warp][place - 1], 1u << (keys[i] & (kMaxUnionGroup - 1)));
  }
  __syncwarp();

  const int32_t* row = nullptr;
  if (request_slot >= 0 && request_slot < map.rows) row = map.req_to_token + request_slot * map.req_stride;
  int pages[kKeysPerLane], slots[kKeysPerLane];
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const int entry = lane + i * kWarpSize;
    pages[i] = entry < count ? shared.pages[warp][entry] : -1;
    slots[i] = first_slot(map, row, pages[i], page_size);
  }
  if (lane == 0) plan.counts[plan_row] = count;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const int entry = lane + i * kWarpSize;
    if (entry >= max_union) break;
    plan.pages[plan_row * max_union + entry] = pages[i];
    plan.masks[plan_row * max_union + entry] = static_cast<uint8_t>(shared.masks[warp][entry]);
    if (plan.slots == nullptr) continue;
    const int physical = physical_page(map, slots[i], page_size);
    plan.slots[plan_row * max_union + entry] = physical;
    if (plan.marks == nullptr || physical < 0) continue;
    int32_t* const mark = plan.marks + head * map.num_pool_pages + physical;
    const int tokens = sequence - pages[i] * page_size;
    if (tokens >= page_size) *mark = page_size;  // whoever stores it: no mark is higher
    else atomicMax(mark, tokens);
  }
}

// ---------------------------------------------------------------- Launcher
// topk int32 [kv_heads, tokens, k] with the strides given in elements (the ids of a row are contiguous), k <= 16;
// perm int32 [kv_heads, tokens] contiguous, or null: the original order; window > 0; group_size 1..8; `groups` at least
// the number of groups of the batch, padding rows included; max_union = group_size * k. req_to_token and plan.slots may
// be null. A sequence has fewer than 2^29 - 1 pages. Asynchronous; reads nothing on the host.
inline cudaError_t launch_union_prep(const int32_t* topk, int64_t topk_head_stride, int64_t topk_row_stride,
                                     int kv_heads, int k, const int32_t* perm, Lengths lengths,
                                     const int32_t* req_to_token, int64_t req_stride, int req_rows, int req_positions,
                                     const void* slot_ids, bool slot_ids_are_int64, int num_pool_pages, int window,
                                     int group_size, int page_size, PlanPtrs plan, int groups, int max_union,
                                     cudaStream_t stream) {
  if (k < 0 || k > kMaxTopk || window < 1 || group_size < 1 || group_size > kMaxUnionGroup || page_size < 1 ||
      max_union != group_size * k || lengths.requests < 0)
    return cudaErrorInvalidValue;
  if (kv_heads <= 0 || groups <= 0) return cudaSuccess;
  const bool vectors = rows_are_vectors(topk, topk_head_stride, topk_row_stride, k);
  const dim3 grid((groups + kUnionPrepWarps - 1) / kUnionPrepWarps, kv_heads);
  const TokenMap map{req_to_token, req_stride, req_rows, req_positions, slot_ids, slot_ids_are_int64, num_pool_pages};
  PW_LAUNCH(union_prep_kernel, grid, dim3(kUnionPrepWarps * kWarpSize), stream, topk, topk_head_stride, topk_row_stride,
            k, vectors, perm, lengths, map, window, ceil_div(window, group_size), group_size, page_size, plan, groups,
            max_union);
  return cudaGetLastError();
}

}  // namespace pw
