// Union preparation: for each group of up to 16 queries the deduplicated ascending list of the pages they picked, and
// per page the mask of the slots that picked it (bit r: slot r), plus what the attention kernel needs per query and
// page: the last token each slot sees and the physical page, which it also marks for value_tiles.cuh.
//
// One warp per group. Its slots' 16 ids each are spread over the lanes (4 a lane for 8 slots, 8 for 16). A bitmap of the
// ids, whose words are counted by a scan, tells every id its place in the list: the pages in earlier words, and the
// lower bits of its own word. 4096 pages go at a time; a longer sequence takes a round for every 4096 that hold an id.
//
//   Shared memory, a warp        bytes (8 / 16 slots)   written by                          read by
//   bits   [128]                 512                    every lane, by atomics              lane l words 4 l .. 4 l + 3;
//                                                                                           then lanes with ids in them
//   before [128]                 512                    lane l words 4 l .. 4 l + 3         lanes with ids in the word
//   pages  [candidates]          512 / 1024             lanes that hold the page: all       the lane that writes the
//                                                       store the same                      place out
//   masks  [candidates]          512 / 1024             the same, by atomics                the same
//   whole  [1024], of the CTA    4096                   everybody, by atomics               everybody, after a barrier
//
// Every group lists the pages that many others list, so that marks would be written by all SMs at once to a few memory
// sectors (ctx64k_a: 90,929 visits of 504 pages). The groups of a CTA, up to 128 queries, therefore collect the
// pages they mark in a table, and neighbouring threads write the marks of neighbouring pages out (6,627 sectors).
//
//   Timeline of a warp: find the group | load lengths, G, load the order | load ids, clear bits and masks, W | set bits,
//   W | count, W | place pages and slots, W | load the pages' cache slots | write the whole row (W = __syncwarp, G: the
//   kernel before is complete). Few warps share an SM, so time is round trips to memory, and then instructions: loads
//   that do not depend on each other are issued together, divisors are multiplied by. Whole rows are written, so that
//   nothing of an earlier call is left in the buffers.
//
// Launched early (programmatic dependent launch) where it follows regroup, which neither writes what is read before G
// (cu_seqlens, the lengths, slot_ids) nor starts before it is there. A kernel behind this one may start early too.
//
// Registers per thread are asserted by tests/kernels/test_compile.py.
#pragma once

#include "common.cuh"

namespace pw {

// ---------------------------------------------------------------- Constants
constexpr int kMaxUnionGroup = 16;
constexpr int kWordsPerLane = 4;  // of the bitmap: one 16-byte vector
constexpr int kRoundWords = kWordsPerLane * kWarpSize;
constexpr int kRoundPages = kRoundWords * 32;
constexpr int kWholeEntries = 1024;  // table of marked pages

template <int kSlots_>
struct UnionPrepTraits {
  static constexpr int kSlots = kSlots_;  // of the largest group
  static constexpr int kWarps = 128 / kSlots;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kCtasPerProcessor = 3;  // bounds the registers: 40 / 64 a thread
  static constexpr int kCandidates = kSlots * kMaxTopk;
  static constexpr int kIds = kCandidates / kWarpSize;  // a lane's, all of one slot
  static constexpr int kLanesPerSlot = kWarpSize / kSlots;
  static_assert(kWholeEntries % kThreads == 0, "every thread clears and writes the same number of entries");
  using Mask = UnionMask<kSlots>;
  static_assert(kIds * kLanesPerSlot == kMaxTopk && kIds % 4 == 0, "whole vectors of one query per lane");

  struct Group {
    alignas(16) uint32_t bits[kRoundWords];    // of the round's pages
    alignas(16) uint32_t before[kRoundWords];  // pages of the list in front of the word
    int32_t pages[kCandidates];                // the list
    uint32_t masks[kCandidates];
  };
  struct Shared {
    Group groups[kWarps];
    int32_t whole[kWholeEntries];  // physical pages p at p % kWholeEntries that a request fills; -1: none
  };
};

// ---------------------------------------------------------------- Types
// The plan's arrays, contiguous, for kv_heads x groups rows. See UnionPlan in pageweaver_sglang/plan.py.
struct PlanPtrs {
  int32_t* pages;    // [kv_heads, groups, max_union] ascending, then -1
  void* masks;       // [kv_heads, groups, max_union] then 0; uint8 for group_size <= 8, else int32
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
  const void* slot_ids;         // [requests] int32 or int64: row of req_to_token
  bool slot_ids_are_int64;
  int num_pool_pages;
};

struct UnionPrepParams {
  const int32_t* topk;  // [kv_heads, tokens, k]
  int64_t head_stride, row_stride;
  int k;
  bool vectors;         // rows_are_vectors()
  const int32_t* perm;  // [kv_heads, tokens], or null: the original order
  Lengths lengths;
  TokenMap map;
  Divisor window, groups_per_window, group_size, page_size;
  PlanPtrs plan;
  int groups, max_union;
};

// ---------------------------------------------------------------- Functions
// Lists the distinct ids in [0, pages) that the warp's lanes hold, ascending, with the slots that hold them. Returns
// their number; the list can be read.
template <class Traits>
__device__ inline int list_pages(typename Traits::Group& group, const int (&ids)[Traits::kIds], int slot,
                                 uint32_t pages) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = lane; i < Traits::kCandidates; i += kWarpSize) group.masks[i] = 0;
  int count = 0;
  for (uint32_t base = 0; base < pages;) {
    const uint32_t end = min(pages - base, static_cast<uint32_t>(kRoundPages));
    uint4& own_bits = *reinterpret_cast<uint4*>(group.bits + lane * kWordsPerLane);
    own_bits = uint4{0, 0, 0, 0};
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Traits::kIds; ++i) {
      const uint32_t bit = static_cast<uint32_t>(ids[i]) - base;  // far behind the end for an id in front of base
      atomicOr(&group.bits[bit / 32 % kRoundWords], bit < end ? 1u << bit % 32 : 0);
    }
    __syncwarp();
    const uint4 own = own_bits;
    const int x = __popc(own.x), y = x + __popc(own.y), z = y + __popc(own.z), all = z + __popc(own.w);
    int through = all;  // this lane
#pragma unroll
    for (int d = 1; d < kWarpSize; d *= 2) {
      const int below = __shfl_up_sync(kFullWarp, through, d);
      if (lane >= d) through += below;
    }
    const uint32_t first = static_cast<uint32_t>(count + through - all);
    count += __shfl_sync(kFullWarp, through, kWarpSize - 1);
    *reinterpret_cast<uint4*>(group.before + lane * kWordsPerLane) = uint4{first, first + x, first + y, first + z};
    __syncwarp();
    uint32_t place[Traits::kIds];
#pragma unroll
    for (int i = 0; i < Traits::kIds; ++i) {  // an id of another round reads some word: no branch holds up the reads
      const uint32_t bit = static_cast<uint32_t>(ids[i]) - base, word = bit / 32 % kRoundWords;
      place[i] = group.before[word] + static_cast<uint32_t>(__popc(group.bits[word] & ((1u << bit % 32) - 1)));
    }
#pragma unroll
    for (int i = 0; i < Traits::kIds; ++i) {
      if (static_cast<uint32_t>(ids[i]) - base >= end) continue;
      group.pages[place[i]] = ids[i];
      atomicOr(&group.masks[place[i]], 1u << slot);
    }
    __syncwarp();
    base += kRoundPages;
    if (base >= pages) break;
    uint32_t next = pages;
#pragma unroll
    for (int i = 0; i < Traits::kIds; ++i)
      if (static_cast<uint32_t>(ids[i]) >= base) next = min(next, static_cast<uint32_t>(ids[i]));
    next = __reduce_min_sync(kFullWarp, next);
    if (next >= pages) break;
    base = next / kRoundPages * kRoundPages;
  }
  return count;
}

// Cache slot of the first token of a logical page; -1 when it cannot be read.
__device__ inline int first_slot(const TokenMap& map, const int32_t* row, int page, int page_size) {
  const int64_t position = static_cast<int64_t>(page) * page_size;
  return row != nullptr && page >= 0 && position < map.positions ? __ldg(row + position) : -1;
}

// Physical page that starts with cache slot `slot`; -1 when none of the pool does.
__device__ inline int physical_page(const TokenMap& map, int slot, const Divisor& page_size) {
  const int page = page_size.divide(max(slot, 0));
  return (page * static_cast<int>(page_size.value) == slot) & (page < map.num_pool_pages) ? page : -1;
}

// Prepares one group of one KV head; called by a whole warp.
template <class Traits>
__device__ inline void prepare_group(const UnionPrepParams& p, int64_t head, int group,
                                     typename Traits::Shared& shared) {
  constexpr int kIds = Traits::kIds;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int window = static_cast<int>(p.window.value), group_size = static_cast<int>(p.group_size.value);
  const int page_size = static_cast<int>(p.page_size.value);
  const PlanPtrs& plan = p.plan;
  const int64_t plan_row = head * p.groups + group;

  const Location at = locate(p.lengths, group, [&](int rows) {
    const int windows = p.window.divide(rows);
    return windows * static_cast<int>(p.groups_per_window.value) + p.group_size.ceil_divide(rows - windows * window);
  });
  const bool attends = at.request >= 0 && at.request < p.lengths.requests;
  int first = 0, members = 0;
  if (at.request >= 0) {
    const int windows = p.groups_per_window.divide(at.unit), window_begin = windows * window;  // rows of the request
    const int group_begin =
        window_begin + (at.unit - windows * static_cast<int>(p.groups_per_window.value)) * group_size;
    const int window_end = window_begin + min(window, at.end - at.begin - window_begin);
    first = at.begin + group_begin;
    members = min(group_size, window_end - group_begin);
  }
  // These reads need nothing but the request: all are under way before the first result is used, even by a conversion.
  const int slot = lane / Traits::kLanesPerSlot;  // of this lane's ids
  int query = -1, length = 0, prefix = 0, request_slot = -1, upper_half = 0;
  if (attends) {
    length = (p.lengths.seq_lens != nullptr ? p.lengths.seq_lens : p.lengths.prefix_lens)[at.request];
    prefix = p.lengths.prefix_lens[at.request];
    if (p.map.slot_ids != nullptr) {
      const auto ids = static_cast<const int32_t*>(p.map.slot_ids);
      request_slot = ids[p.map.slot_ids_are_int64 ? 2 * at.request : at.request];
      if (p.map.slot_ids_are_int64) upper_half = ids[2 * at.request + 1];
    }
  }
  wait_for_previous_kernel();  // nothing that regroup or a kernel before it touches is read or written ahead of this
  // Padding rows belong to nobody, whatever the caller's order says of them.
  if (slot < members)
    query = p.perm != nullptr && attends ? p.perm[head * p.lengths.tokens + first + slot] : first + slot;
  if (query < at.begin || query >= at.end) query = -1;  // never read a row that is not the request's own
  int ids[kIds];
#pragma unroll
  for (int i = 0; i < kIds; ++i) ids[i] = -1;
  if (query >= 0)
    load_ids(p.topk + head * p.head_stride + query * p.row_stride, lane % Traits::kLanesPerSlot * kIds, p.k, p.vectors,
             ids);

  const int sequence = max(p.lengths.seq_lens != nullptr ? length : length + (at.end - at.begin), 0);
  if (lane % Traits::kLanesPerSlot == 0 && slot < group_size) {
    const int limit = query >= 0 && attends ? min(prefix + (query - at.begin), sequence - 1) : -1;
    plan.queries[plan_row * group_size + slot] = query;
    plan.limits[plan_row * group_size + slot] = max(limit, -1);
  }
  typename Traits::Group& list = shared.groups[warp];
  const int count = list_pages<Traits>(list, ids, slot, static_cast<uint32_t>(p.page_size.ceil_divide(sequence)));

  const int32_t* row = nullptr;
  if (p.map.req_to_token != nullptr && upper_half == 0 && request_slot >= 0 && request_slot < p.map.rows)
    row = p.map.req_to_token + request_slot * p.map.req_stride;
  using Mask = typename Traits::Mask;
  int pages[kIds], slots[kIds];
  Mask members_of[kIds];
  int replaced[kIds];  // pages that had to leave the table
#pragma unroll
  for (int i = 0; i < kIds; ++i) {
    const int entry = lane + i * kWarpSize;
    pages[i] = entry < count ? list.pages[entry] : -1;
    members_of[i] = entry < count ? static_cast<Mask>(list.masks[entry]) : Mask{0};
    slots[i] = first_slot(p.map, row, pages[i], page_size);
    replaced[i] = -1;
  }
  if (lane == 0) plan.counts[plan_row] = count;
  int32_t* const marks = plan.marks != nullptr ? plan.marks + head * p.map.num_pool_pages : nullptr;
#pragma unroll
  for (int i = 0; i < kIds; ++i) {
    const int entry = lane + i * kWarpSize;
    if (entry >= p.max_union) break;
    const int64_t place = plan_row * p.max_union + entry;
    plan.pages[place] = pages[i];
    static_cast<Mask*>(plan.masks)[place] = members_of[i];
    if (plan.slots == nullptr) continue;
    const int physical = slots[i] = physical_page(p.map, slots[i], p.page_size);
    plan.slots[place] = physical;
    if (marks == nullptr || physical < 0) continue;
    const int tokens = sequence - pages[i] * page_size;
    if (tokens < page_size) atomicMax(&marks[physical], tokens);  // the last page of a request
    else replaced[i] = atomicExch(&shared.whole[physical % kWholeEntries], physical);
  }
  if (marks == nullptr) return;
#pragma unroll
  for (int i = 0; i < kIds; ++i)
    if (replaced[i] >= 0 && replaced[i] != slots[i]) marks[replaced[i]] = page_size;
}

// ---------------------------------------------------------------- Kernel
// grid (ceil(groups / kWarps), kv_heads), block kThreads
template <int kSlots>
__global__ void __launch_bounds__(UnionPrepTraits<kSlots>::kThreads, UnionPrepTraits<kSlots>::kCtasPerProcessor)
    union_prep_kernel(UnionPrepParams p) {
  using Traits = UnionPrepTraits<kSlots>;
  PW_SHARED(typename Traits::Shared, shared);
  let_next_kernel_start();
  const int group = static_cast<int>(blockIdx.x) * Traits::kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
  if (p.plan.marks != nullptr) {
#pragma unroll
    for (int i = 0; i < kWholeEntries; i += Traits::kThreads) shared.whole[i + threadIdx.x] = -1;
    __syncthreads();
  }
  if (group < p.groups) prepare_group<Traits>(p, blockIdx.y, group, shared);
  if (p.plan.queue != nullptr && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < 2) p.plan.queue[threadIdx.x] = 0;
  if (p.plan.marks != nullptr) {
    __syncthreads();
    int32_t* const marks = p.plan.marks + static_cast<int64_t>(blockIdx.y) * p.map.num_pool_pages;
#pragma unroll
    for (int i = 0; i < kWholeEntries; i += Traits::kThreads) {
      const int page = shared.whole[i + threadIdx.x];
      if (page >= 0) marks[page] = static_cast<int>(p.page_size.value);  // whoever stores it: no mark is higher
    }
  }
}

// ---------------------------------------------------------------- Launcher
// topk int32 [kv_heads, tokens, k] with the strides given in elements (the ids of a row are contiguous), k <= 16;
// perm int32 [kv_heads, tokens] contiguous, or null: the original order; window > 0; group_size 1..16; `groups` at
// least the number of groups of the batch, padding rows included; max_union = group_size * k. req_to_token and
// plan.slots may be null. behind_regroup: the kernel launched just before this one into the stream is regroup.
// Asynchronous; reads nothing on the host.
inline cudaError_t launch_union_prep(const int32_t* topk, int64_t topk_head_stride, int64_t topk_row_stride,
                                     int kv_heads, int k, const int32_t* perm, Lengths lengths,
                                     const int32_t* req_to_token, int64_t req_stride, int req_rows, int req_positions,
                                     const void* slot_ids, bool slot_ids_are_int64, int num_pool_pages, int window,
                                     int group_size, int page_size, PlanPtrs plan, int groups, int max_union,
                                     bool behind_regroup, cudaStream_t stream) {
  if (k < 0 || k > kMaxTopk || window < 1 || group_size < 1 || group_size > kMaxUnionGroup || page_size < 1 ||
      max_union != group_size * k || lengths.requests < 0)
    return cudaErrorInvalidValue;
  if (kv_heads <= 0 || groups <= 0) return cudaSuccess;
  UnionPrepParams p;
  p.topk = topk;
  p.head_stride = topk_head_stride;
  p.row_stride = topk_row_stride;
  p.k = k;
  p.vectors = rows_are_vectors(topk, topk_head_stride, topk_row_stride, k);
  p.perm = perm;
  p.lengths = lengths;
  p.map = {req_to_token, req_stride, req_rows, req_positions, slot_ids, slot_ids_are_int64, num_pool_pages};
  p.window = Divisor(window);
  p.groups_per_window = Divisor(ceil_div(window, group_size));
  p.group_size = Divisor(group_size);
  p.page_size = Divisor(page_size);
  p.plan = plan;
  p.groups = groups;
  p.max_union = max_union;
  const auto launch = [&](auto traits, auto kernel) {
    using Traits = decltype(traits);
    const dim3 grid(ceil_div(groups, Traits::kWarps), kv_heads), block(Traits::kThreads);
    if (behind_regroup) return PW_LAUNCH_EARLY(kernel, grid, block, stream, p);
    PW_LAUNCH(kernel, grid, block, stream, p);
    return cudaGetLastError();
  };
  return group_size <= 8 ? launch(UnionPrepTraits<8>{}, union_prep_kernel<8>)
                         : launch(UnionPrepTraits<16>{}, union_prep_kernel<16>);
}

}  // namespace pw
