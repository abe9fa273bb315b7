// Regroup: permutes query ids inside windows so that queries that picked similar pages share an execution group.
//
// Algorithm 1, per request, KV head and window of 64 or 128 consecutive queries: the seed of a group is the smallest
// unassigned id; then, until the group is full or no query is left, add the query with the smallest pair (number of its
// pages that are not in the group's union yet, id) and add its pages to the union. The next group starts with an
// empty union. Only counts of pages matter, so pages may be renamed freely, and a page that occurs once in a window
// costs its query one visit whatever the order: it needs no bit. At most window * 16 / 2 pages occur twice or more,
// so bitmaps of 16 (window 64) or 32 words (window 128) serve every context length.
//
// One CTA per (window, KV head), one thread per query.
//
//   Shared memory        bytes (W 64 / 128)   written by                        read by
//   slots.direct         16384                page names: the last occurrence of a page in the window, then kSharedPage,
//    or slots.hashed      12288 / 24576        then the page's bit. Contexts over 8192 pages find a page's entry
//                                             through a hash table of the window's pages, others use its id.
//   rows                  5120 / 18432        each thread its query's bitmap    everybody (the winner's row: broadcast)
//   partial                 16 / 32           lane 0 of each warp               everybody; double buffered
//
//   Phase 1, naming       load ids | store occurrence | B | who is last? | B | others mark the page shared | B |
//                         number the shared pages (block scan, 1 B) | B | set bits of the own row | B
//   Phase 2, greedy       per query placed: key = cost << 16 | local id; redux.min per warp; B; block minimum;
//                         drop the winner's pages from the own `remaining` bitmap (registers); cost = popcount.
//                         A seed needs no minimum: everybody tracks the unassigned set.
//   (B = barrier of the CTA)
//
// At most 128 registers per thread and 24 / 45 KiB of shared memory, so that 4 CTAs of window 128 fit an SM: one wave
// holds all windows of four KV heads of a 16K chunk. tests/kernels/test_compile.py asserts both.
#pragma once

#include "common.cuh"

namespace pw {

// ---------------------------------------------------------------- Constants
constexpr int kMaxRegroupGroup = 32;         // largest group size
constexpr int kDirectPages = 8192;           // 1M tokens of page size 128: a page's id is its entry in the name table
constexpr uint16_t kSharedPage = 0xffff;     // name table: the page occurs more than once
constexpr unsigned kAssigned = 0xffffffffu;  // key of a query that cannot be chosen

template <int kWindow>
struct RegroupTraits {
  static constexpr int kThreads = kWindow;
  static constexpr int kWarps = kWindow / kWarpSize;
  static constexpr int kOccurrences = kWindow * kMaxTopk;
  static constexpr int kMaxWords = kOccurrences / 2 / 32;  // bits: pages that occur at least twice
  static constexpr int kHashEntries = 2 * kOccurrences;    // load factor of at most one half
  // Rows are read as 16-byte vectors; an odd number of vectors per row keeps reads of all own rows conflict-free.
  __host__ __device__ static constexpr int row_stride(int words) { return words / 4 % 2 ? words : words + 4; }

  struct Shared {
    union {
      uint16_t direct[kDirectPages];
      struct {
        uint16_t names[kHashEntries];
        int32_t pages[kHashEntries];
      } hashed;
    } slots;
    alignas(16) uint32_t rows[kWindow * row_stride(kMaxWords)];
    alignas(16) uint32_t partial[2][kWarps];
  };
  static_assert(kOccurrences <= kSharedPage, "occurrence numbers and kSharedPage must differ");
  static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");
};

// ---------------------------------------------------------------- Functions
template <int kWords>
__device__ inline void load_row(const uint32_t* row, uint32_t (&words)[kWords]) {
  static_assert(kWords % 4 == 0, "rows are read as 16-byte vectors");
#pragma unroll
  for (int v = 0; v < kWords / 4; ++v) {
    const uint4 four = reinterpret_cast<const uint4*>(row)[v];
    words[4 * v] = four.x, words[4 * v + 1] = four.y, words[4 * v + 2] = four.z, words[4 * v + 3] = four.w;
  }
}

template <int kWords>
__device__ inline void remove_row(const uint32_t* row, uint32_t (&remaining)[kWords]) {
  uint32_t words[kWords];
  load_row(row, words);
#pragma unroll
  for (int w = 0; w < kWords; ++w) remaining[w] &= ~words[w];
}

// Set bits of all words. A population count occupies its pipe four times as long as a logic instruction, so
// three words are first added bitwise into a sum and a carry.
template <int kWords>
__device__ inline int count_bits(const uint32_t (&words)[kWords]) {
  int ones = 0, twos = 0;
#pragma unroll
  for (int w = 0; w + 2 < kWords; w += 3) {
    const uint32_t a = words[w], b = words[w + 1], c = words[w + 2];
    ones += __popc(a ^ b ^ c);
    twos += __popc((a & b) | (a & c) | (b & c));
  }
#pragma unroll
  for (int w = kWords - kWords % 3; w < kWords; ++w) ones += __popc(words[w]);
  return ones + 2 * twos;
}

// Sum over the CTA. `scratch` holds one word per warp; the caller has a barrier between two uses of it.
template <int kWarps>
__device__ inline int block_sum(int value, uint32_t* scratch) {
  const int sum = __reduce_add_sync(kFullWarp, value);
  if (threadIdx.x % kWarpSize == 0) scratch[threadIdx.x / kWarpSize] = static_cast<uint32_t>(sum);
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += static_cast<int>(scratch[w]);
  return total;
}

// Entry of `page` in the window's hash table: linear probing; the table is at most half full.
template <int kEntries>
__device__ inline int hash_entry(int32_t* pages, int page) {
  static_assert((kEntries & (kEntries - 1)) == 0, "a power of two");
  unsigned entry = (static_cast<uint32_t>(page) * 2654435769u) >> 16;  // Fibonacci hashing
  while (true) {
    entry %= kEntries;
    const int found = atomicCAS(&pages[entry], -1, page);
    if (found == -1 || found == page) return static_cast<int>(entry);
    ++entry;
  }
}

// Phase 1. `ids` holds the query's page ids (-1: none). On return ids[j] is the page's entry in the name table, or -1
// where the page needs no bit; `single` counts the pages that occur only once in the window. Returns the name
// table: names[ids[j]] is the page's bit, numbered from 0 to `bits`. Ends before the barrier that makes it readable.
template <int kWindow>
__device__ inline const uint16_t* name_pages(typename RegroupTraits<kWindow>::Shared& shared, int pages,
                                             int (&ids)[kMaxTopk], int& single, int& bits) {
  using Traits = RegroupTraits<kWindow>;
  const int t = threadIdx.x, lane = t % kWarpSize, warp = t / kWarpSize;
  uint16_t* names = shared.slots.direct;
  if (pages > kDirectPages) {
    names = shared.slots.hashed.names;
    for (int i = t; i < Traits::kHashEntries; i += Traits::kThreads) shared.slots.hashed.pages[i] = -1;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kMaxTopk; ++j)
      if (ids[j] >= 0) ids[j] = hash_entry<Traits::kHashEntries>(shared.slots.hashed.pages, ids[j]);
  }
  // Every occurrence of a page stores its own number; one of them stays. The others know that the page is shared.
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j)
    if (ids[j] >= 0) names[ids[j]] = static_cast<uint16_t>(t * kMaxTopk + j);
  __syncthreads();
  unsigned last = 0;
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j)
    if (ids[j] >= 0 && names[ids[j]] == t * kMaxTopk + j) last |= 1u << j;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j)
    if (ids[j] >= 0 && (last >> j & 1) == 0) names[ids[j]] = kSharedPage;
  __syncthreads();
  // The occurrence that stayed numbers its page when others marked it; otherwise nobody else has it.
  unsigned naming = 0;
  single = 0;
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j) {
    if ((last >> j & 1) == 0) continue;
    if (names[ids[j]] == kSharedPage) {
      naming |= 1u << j;
    } else {
      ids[j] = -1;
      ++single;
    }
  }
  const int count = __popc(naming);
  int next = count;
  for (int d = 1; d < kWarpSize; d *= 2) {
    const int below = __shfl_up_sync(kFullWarp, next, d);
    if (lane >= d) next += below;
  }
  if (lane == kWarpSize - 1) shared.partial[0][warp] = static_cast<uint32_t>(next);
  next -= count;
  __syncthreads();
  bits = 0;
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    if (w < warp) next += static_cast<int>(shared.partial[0][w]);
    bits += static_cast<int>(shared.partial[0][w]);
  }
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j)
    if (naming >> j & 1) names[ids[j]] = static_cast<uint16_t>(next++);
  return names;
}

// Phase 2 for bitmaps of kWords words. Returns the place of this thread's query in the window's new order.
template <int kWindow, int kWords>
__device__ inline int greedy_order(typename RegroupTraits<kWindow>::Shared& shared, const uint16_t* names,
                                   const int (&ids)[kMaxTopk], int single, int queries, int group_size, bool guard) {
  using Traits = RegroupTraits<kWindow>;
  constexpr int kStride = Traits::row_stride(kWords);
  const int t = threadIdx.x;
  uint32_t* own = shared.rows + t * kStride;
#pragma unroll
  for (int v = 0; v < kWords / 4; ++v) reinterpret_cast<uint4*>(own)[v] = uint4{0, 0, 0, 0};
  __syncthreads();  // the names are complete
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j) {
    if (ids[j] < 0) continue;
    const unsigned bit = names[ids[j]];
    atomicOr(&own[bit / 32], 1u << bit % 32);  // the thread's own row: the atomic only saves the wait for the word
  }
  __syncthreads();  // the rows are complete

  uint32_t remaining[kWords];  // pages of this query that the group's union does not hold
  int visits = 0;              // of this query in the original order: pages that no earlier member of its group has
  if (guard && t < queries) {
    load_row(own, remaining);
    for (int member = t - t % group_size; member < t; ++member) remove_row(shared.rows + member * kStride, remaining);
    visits = single + count_bits(remaining);
  }

  uint32_t unassigned[Traits::kWarps];  // the same in every thread
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    const int left = queries - w * kWarpSize;
    unassigned[w] = left >= kWarpSize ? kFullWarp : (left > 0 ? (1u << left) - 1 : 0);
  }
  bool chosen = t >= queries;
  int place = t, paid = 0, cost = 0, member = 0, buffer = 0;
  for (int position = 0; position < queries; ++position) {
    int winner = 0;
    if (member == 0) {
#pragma unroll
      for (int w = Traits::kWarps - 1; w >= 0; --w)
        if (unassigned[w] != 0) winner = w * kWarpSize + __ffs(static_cast<int>(unassigned[w])) - 1;
      load_row(own, remaining);
      cost = single + count_bits(remaining);
    } else {
      const unsigned key = chosen ? kAssigned : static_cast<unsigned>(cost) << 16 | static_cast<unsigned>(t);
      const unsigned least = __reduce_min_sync(kFullWarp, key);
      if (t % kWarpSize == 0) shared.partial[buffer][t / kWarpSize] = least;
      // One barrier per step: this buffer is written again two barriers later, when everybody has read it.
      __syncthreads();
      unsigned best = kAssigned;
#pragma unroll
      for (int w = 0; w < Traits::kWarps; ++w) best = min(best, shared.partial[buffer][w]);
      winner = static_cast<int>(best & 0xffff);
      buffer ^= 1;
    }
    if (t == winner) {
      chosen = true;
      place = position;
      paid = cost;
    }
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w)
      if (w == winner / kWarpSize) unassigned[w] &= ~(1u << winner % kWarpSize);
    if (++member == group_size) {
      member = 0;
    } else {
      remove_row(shared.rows + winner * kStride, remaining);
      cost = single + count_bits(remaining);
    }
  }
  if (!guard) return place;
  __syncthreads();
  return block_sum<Traits::kWarps>(paid - visits, shared.partial[0]) < 0 ? place : t;
}

// ---------------------------------------------------------------- Kernel
// grid (tokens / window + requests + 1, kv_heads), block kWindow
template <int kWindow>
__global__ void __launch_bounds__(kWindow)
    regroup_kernel(const int32_t* __restrict__ topk, int64_t head_stride, int64_t row_stride, int k, bool vectors,
                   Lengths lengths, int group_size, int page_size, int capacity, bool guard,
                   int32_t* __restrict__ perm) {
  using Traits = RegroupTraits<kWindow>;
  PW_SHARED(typename Traits::Shared, shared);
  const int t = threadIdx.x;
  const Location at = locate(lengths, static_cast<int>(blockIdx.x), [](int rows) { return ceil_div(rows, kWindow); });
  if (at.request < 0) return;
  const int first = at.begin + at.unit * kWindow;
  const int queries = min(kWindow, at.end - first);
  int32_t* const out = perm + static_cast<int64_t>(blockIdx.y) * lengths.tokens + first;
  const bool padding = at.request == lengths.requests;
  const int pages = padding ? 0 : ceil_div(sequence_length(lengths, at), page_size);
  if (padding || (capacity > 0 && pages > capacity)) {
    if (t < queries) out[t] = first + t;
    return;
  }

  int ids[kMaxTopk];
#pragma unroll
  for (int v = 0; v < kMaxTopk / 4; ++v) {
    int four[4] = {-1, -1, -1, -1};
    if (t < queries)
      load_four_pages(topk + blockIdx.y * head_stride + (first + t) * row_stride, 4 * v, k, vectors, pages, four);
#pragma unroll
    for (int i = 0; i < 4; ++i) ids[4 * v + i] = four[i];
  }
  int single, bits;
  const uint16_t* names = name_pages<kWindow>(shared, pages, ids, single, bits);

  int place;
  if (bits <= 4 * 32)
    place = greedy_order<kWindow, 4>(shared, names, ids, single, queries, group_size, guard);
  else if (bits <= 8 * 32)
    place = greedy_order<kWindow, 8>(shared, names, ids, single, queries, group_size, guard);
  else if (bits <= 16 * 32)
    place = greedy_order<kWindow, 16>(shared, names, ids, single, queries, group_size, guard);
  else
    place = greedy_order<kWindow, Traits::kMaxWords>(shared, names, ids, single, queries, group_size, guard);
  if (t < queries) out[place] = first + t;
}

// ---------------------------------------------------------------- Launcher
// topk int32 [kv_heads, tokens, k] with the strides given in elements (the ids of a row are contiguous), k <= 16;
// window 64 or 128; group_size 1..32. capacity 0: every request is regrouped; > 0: a request of more logical pages
// keeps its original order. guard_window: a window keeps its original order unless the new one has fewer page visits.
// Writes perm int32 [kv_heads, tokens], contiguous; padding rows get their own id. Asynchronous; reads nothing on the
// host.
inline cudaError_t launch_regroup(const int32_t* topk, int64_t topk_head_stride, int64_t topk_row_stride, int kv_heads,
                                  int k, Lengths lengths, int window, int group_size, int page_size, int capacity,
                                  bool guard_window, int32_t* perm, cudaStream_t stream) {
  if (k < 0 || k > kMaxTopk || (window != 64 && window != 128) || group_size < 1 || group_size > kMaxRegroupGroup ||
      page_size < 1 || capacity < 0 || lengths.requests < 0)
    return cudaErrorInvalidValue;
  if (kv_heads <= 0 || lengths.tokens <= 0) return cudaSuccess;
  const bool vectors = rows_are_vectors(topk, topk_head_stride, topk_row_stride, k);
  const dim3 grid(lengths.tokens / window + lengths.requests + 1, kv_heads);
  if (window == 64)
    PW_LAUNCH(regroup_kernel<64>, grid, dim3(64), stream, topk, topk_head_stride, topk_row_stride, k, vectors, lengths,
              group_size, page_size, capacity, guard_window, perm);
  else
    PW_LAUNCH(regroup_kernel<128>, grid, dim3(128), stream, topk, topk_head_stride, topk_row_stride, k, vectors,
              lengths, group_size, page_size, capacity, guard_window, perm);
  return cudaGetLastError();
}

}  // namespace pw
