// Regroup: permutes query ids inside windows so that queries that picked similar pages share an execution group.
//
// Algorithm 1, per request, KV head and window of 64 or 128 consecutive queries: the seed of a group is the smallest
// unassigned id; then, until the group is full or no query is left, add the query with the smallest pair (number of its
// pages that are not in the group's union yet, id) and add its pages to the union. The next group starts with an
// empty union. Only counts of pages matter, so pages may be renamed freely, and a page that occurs once in a window
// costs its query one visit whatever the order: it needs no bit. (An id that one query repeats gets a bit, and so still
// counts once.) At most window * 16 / 2 pages occur twice or more, so bitmaps of 16 (window 64) or 32 words (window
// 128) serve every context length.
//
// One CTA per (window, KV head), one thread per query.
//
//   Shared memory     bytes (W 64 / 128)   written by                          read by
//   table                 16384            how often each page occurs:         everybody: counts, then names
//                                          everybody, by atomics; then the
//                                          page's bit or kSingle: the thread
//                                          to which the entry belongs
//   rows                   5120 / 18432    each thread its query's bitmap      everybody (the winner's row: broadcast)
//    or pages              8192 / 16384    hash table, before there are rows   everybody, by atomics
//   singles                 256 / 512      each thread, pages without a bit    the query's thread of the greedy phase
//   partial                  16 / 32       lane 0 of each warp                 everybody; double buffered
//   sums                     16 / 32       one thread of each warp             everybody
//
//   Phase 1, naming       load ids, clear the table | B | count pages | B | number the shared ones (block scan, 1 B) |
//                         B | set bits of the own row | B
//   Phase 2, greedy       per query placed: key = cost, query, row; redux.min per warp; B; block minimum; drop the
//                         winner's pages from the own `remaining` bitmap (registers); cost = popcount. A seed needs no
//                         minimum: every warp tracks the unassigned set. In windows of 64 the first warp does it alone,
//                         two queries per lane, and needs no barriers.
//   Guard, counters       visits of the original order (block sum, 1 B) before phase 2, of the new one after it.
//   (B = barrier of the CTA)
//
// Up to 4096 pages a page's id is its entry in the table; past that a hash table of the window's pages gives the entry.
// Between two barriers no place is stored to by two threads, except by atomics.
//
// At most 128 registers per thread and 25 / 36 KiB of shared memory, so that 4 CTAs of window 128 fit an SM: one wave
// holds all windows of four KV heads of a 16K chunk. tests/kernels/test_compile.py asserts both.
#pragma once

#include "common.cuh"

namespace pw {

// ---------------------------------------------------------------- Constants
constexpr int kMaxRegroupGroup = 32;  // largest group size
constexpr int kTableEntries = 4096;   // 512K tokens of page size 128: a page's id is its entry in the name table
constexpr uint32_t kSingle = 0xffff;  // name of a page that occurs once

// Key of a query that may join the group: its new pages, its number in the window and the byte where its row starts.
constexpr int kCostShift = 26, kQueryShift = 19;
constexpr uint32_t kRowMask = (1u << kQueryShift) - 1;
constexpr uint32_t kAssigned = 32u << kCostShift;  // more than any cost: the query has its place

constexpr int kSinglesShift = 16;  // where a sum of visits has those of pages without a bit

template <int kWindow>
struct RegroupTraits {
  static constexpr int kThreads = kWindow;
  static constexpr int kWarps = kWindow / kWarpSize;
  // The greedy phase: one warp, or all of them, which then meet at a barrier per query placed.
  static constexpr int kQueriesPerThread = kWindow == 64 ? 2 : 1;
  static constexpr int kGreedyThreads = kWindow / kQueriesPerThread;
  static constexpr int kGreedyWarps = kGreedyThreads / kWarpSize;
  static constexpr int kOccurrences = kWindow * kMaxTopk;
  static constexpr int kMaxWords = kOccurrences / 2 / 32;  // bits: pages that occur at least twice
  static constexpr int kHashEntries = 2 * kOccurrences;    // load factor of at most one half
  // Rows are read as 16-byte vectors; an odd number of vectors per row keeps reads of all own rows conflict-free.
  __host__ __device__ static constexpr int row_stride(int words) { return ((words + 3) / 4 | 1) * 4; }

  struct Shared {
    alignas(16) uint32_t table[kTableEntries];  // by page id or entry of `pages`
    union {
      alignas(16) uint32_t rows[kWindow * row_stride(kMaxWords)];
      int32_t pages[kHashEntries];
    };
    uint32_t singles[kWindow];
    alignas(16) uint32_t partial[2][kWarps];
    alignas(16) uint32_t sums[2][kWarps];
  };
  static_assert(kGreedyWarps == 1 || kGreedyThreads == kThreads, "a barrier needs all threads");
  static_assert(kHashEntries <= kTableEntries, "entries of the hash table are entries of the name table");
  static_assert(kOccurrences / 2 < kSingle, "names and kSingle must differ");
  static_assert(kOccurrences < 1 << (kSinglesShift - 1), "two sums of visits in one int");
  static_assert(kWindow << kQueryShift <= 1 << kCostShift, "number of a query in its key");
  static_assert(kWindow * row_stride(kMaxWords) * 4 <= 1 << kQueryShift, "offset of a row in a key");
  static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");
};

// ---------------------------------------------------------------- Functions
template <int kWords>
__device__ inline void load_row(const uint32_t* row, uint32_t (&words)[kWords]) {
  static_assert(kWords % 2 == 0, "rows are read as vectors of 16 and 8 bytes");
#pragma unroll
  for (int w = 0; w + 3 < kWords; w += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(row + w);
    words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
  }
  if constexpr (kWords % 4 == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(row + kWords - 2);
    words[kWords - 2] = two.x, words[kWords - 1] = two.y;
  }
}

// sum + (set bits of all words << kShift). A population count occupies its pipe four times as long as a logic
// instruction, so three words are first added bitwise into a word of ones and a word of twos.
template <int kShift, int kWords>
__device__ inline uint32_t add_bits(uint32_t sum, const uint32_t (&words)[kWords]) {
  if constexpr (kWords < 3) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) sum += static_cast<uint32_t>(__popc(words[w])) << kShift;
    return sum;
  } else {
    constexpr int kTriples = kWords / 3;
    uint32_t ones[kTriples + kWords % 3], twos[kTriples];
#pragma unroll
    for (int i = 0; i < kTriples; ++i) {
      const uint32_t a = words[3 * i], b = words[3 * i + 1], c = words[3 * i + 2];
      ones[i] = a ^ b ^ c;
      twos[i] = (a & b) | (a & c) | (b & c);
    }
#pragma unroll
    for (int i = 0; i < kWords % 3; ++i) ones[kTriples + i] = words[3 * kTriples + i];
    return add_bits<kShift>(add_bits<kShift + 1>(sum, twos), ones);
  }
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

template <int kThreads>
__device__ inline void clear_table(uint32_t (&table)[kTableEntries]) {
#pragma unroll
  for (int i = 4 * threadIdx.x; i < kTableEntries; i += 4 * kThreads)
    *reinterpret_cast<uint4*>(table + i) = uint4{0, 0, 0, 0};
}

// Phase 1. The table is cleared, `ids` holds the query's page ids (-1: none). On return ids[j] is the page's entry in
// the table, which holds the page's name: its bit, or kSingle. Names run from 0 to the returned number. Ends before the
// barrier that makes the names readable.
template <int kWindow>
__device__ inline int name_pages(typename RegroupTraits<kWindow>::Shared& shared, int pages, int (&ids)[kMaxTopk]) {
  using Traits = RegroupTraits<kWindow>;
  const int t = threadIdx.x, lane = t % kWarpSize, warp = t / kWarpSize;
  int entries = pages;
  if (pages > kTableEntries) {
    entries = Traits::kHashEntries;
    for (int i = t; i < Traits::kHashEntries; i += Traits::kThreads) shared.pages[i] = -1;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kMaxTopk; ++j)
      if (ids[j] >= 0) ids[j] = hash_entry<Traits::kHashEntries>(shared.pages, ids[j]);
  } else {
    __syncthreads();
  }
  // Nobody uses the old value: the hardware then adds all lanes that count the same page at once.
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j)
    if (ids[j] >= 0) atomicAdd(&shared.table[ids[j]], 1u);
  __syncthreads();
  // Each thread names the pages of the entries 4 t, 4 t + 1, ... of every round.
  int count = 0;
  for (int i = 4 * t; i < entries; i += 4 * Traits::kThreads) {
    const uint4 times = *reinterpret_cast<const uint4*>(shared.table + i);
    count += (times.x > 1) + (times.y > 1) + (times.z > 1) + (times.w > 1);
  }
  uint32_t next = count;
#pragma unroll
  for (int d = 1; d < kWarpSize; d *= 2) {
    const uint32_t below = __shfl_up_sync(kFullWarp, next, d);
    if (lane >= d) next += below;
  }
  if (lane == kWarpSize - 1) shared.sums[0][warp] = next;
  next -= count;
  __syncthreads();
  int bits = 0;
#pragma unroll
  for (int w = 0; w < Traits::kWarps; ++w) {
    if (w < warp) next += shared.sums[0][w];
    bits += static_cast<int>(shared.sums[0][w]);
  }
  for (int i = 4 * t; i < entries; i += 4 * Traits::kThreads) {
    uint4& four = *reinterpret_cast<uint4*>(shared.table + i);
    const uint4 times = four;
    uint4 names;
    names.x = times.x > 1 ? next : kSingle, next += times.x > 1;
    names.y = times.y > 1 ? next : kSingle, next += times.y > 1;
    names.z = times.z > 1 ? next : kSingle, next += times.z > 1;
    names.w = times.w > 1 ? next : kSingle, next += times.w > 1;
    four = names;
  }
  return bits;
}

// Writes the query's bitmap and the number of its pages that have no bit. Ends with the barrier that makes both
// readable.
template <int kWindow, int kWords>
__device__ inline void write_row(typename RegroupTraits<kWindow>::Shared& shared, const int (&entries)[kMaxTopk]) {
  uint32_t* const own = shared.rows + threadIdx.x * RegroupTraits<kWindow>::row_stride(kWords);
#pragma unroll
  for (int w = 0; w < kWords; w += 4) *reinterpret_cast<uint4*>(own + w) = uint4{0, 0, 0, 0};
  __syncthreads();  // the names are complete
  uint32_t names[kMaxTopk], single = 0;
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j) names[j] = entries[j] >= 0 ? shared.table[entries[j]] : kSingle + 1;
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j) {
    // The thread's own row: the atomic only saves the wait for the word.
    if (names[j] < kSingle) atomicOr(&own[names[j] / 32], 1u << names[j] % 32);
    single += names[j] == kSingle;
  }
  shared.singles[threadIdx.x] = single;
  __syncthreads();  // the rows are complete
}

// This thread's share of the visits that the window's original order needs, pages without a bit left out: some words of
// the unions of its groups.
template <int kWindow, int kWords>
__device__ inline int original_visits(const uint32_t* rows, int queries, int group_size) {
  constexpr int kStride = RegroupTraits<kWindow>::row_stride(kWords);
  int visits = 0;
  const int words = ceil_div(queries, group_size) * kWords;
  for (int i = threadIdx.x; i < words; i += kWindow) {
    const int begin = i / kWords * group_size, end = min(begin + group_size, queries);
    uint32_t pages = 0;
    for (int query = begin; query < end; ++query) pages |= rows[query * kStride + i % kWords];
    visits += __popc(pages);
  }
  return visits;
}

// Least key of the greedy phase's threads, the same in all of them. `buffer` is 0 or 1 by turns: one barrier per call,
// because a buffer is written again two barriers later, when everybody has read it.
template <int kWindow>
__device__ inline uint32_t least_key(typename RegroupTraits<kWindow>::Shared& shared, uint32_t key, int& buffer) {
  uint32_t least = __reduce_min_sync(kFullWarp, key);
  if constexpr (RegroupTraits<kWindow>::kGreedyWarps > 1) {
    uint32_t* const partial = shared.partial[buffer];
    if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = least;
    __syncthreads();
    least = partial[0];
#pragma unroll
    for (int w = 1; w < RegroupTraits<kWindow>::kWarps; ++w) least = min(least, partial[w]);
    buffer ^= 1;
  }
  return least;
}

// Phase 2 for bitmaps of kWords words: orders the window's queries and writes out[place] = first + query.
//
// With `visits` it also adds the page visits of the original order to visits[0], and those of the order that is written
// to visits[1]. The additions of all windows go in any order; their sum is the same.
template <int kWindow, int kWords>
__device__ inline void order_window(typename RegroupTraits<kWindow>::Shared& shared, const int (&entries)[kMaxTopk],
                                    int first, int queries, int group_size, bool guard, int32_t* out,
                                    unsigned long long* visits) {
  using Traits = RegroupTraits<kWindow>;
  constexpr int kStride = Traits::row_stride(kWords), kEach = Traits::kQueriesPerThread;
  const int t = threadIdx.x, lane = t % kWarpSize;
  write_row<kWindow, kWords>(shared, entries);
  const bool compare = guard || visits != nullptr;
  // Both sums in one: visits of the original order without the pages that have no bit, and above them those pages.
  const int sums = compare ? block_sum<Traits::kWarps>(
                                 original_visits<kWindow, kWords>(shared.rows, queries, group_size) +
                                     (static_cast<int>(shared.singles[t]) << kSinglesShift),
                                 shared.sums[0])
                           : 0;
  if (t >= Traits::kGreedyThreads) return;

  uint32_t remaining[kEach][kWords];  // pages of the thread's queries that the group's union does not hold
  uint32_t base[kEach], own_cost[kEach], key[kEach];
  int place[kEach] = {}, added = 0;  // visits of the new order, pages without a bit left out
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int query = t + r * Traits::kGreedyThreads;
    base[r] = (shared.singles[query] << kCostShift) + (static_cast<uint32_t>(query) << kQueryShift) +
              static_cast<uint32_t>(query * kStride) * 4;
    if (query >= queries) base[r] |= kAssigned;
    load_row(shared.rows + query * kStride, remaining[r]);
    own_cost[r] = add_bits<kCostShift>(0, remaining[r]);
  }
  const int left = queries - lane * kWarpSize;  // lane l keeps the unassigned ones of queries 32 l ... 32 l + 31
  uint32_t unassigned = left >= kWarpSize ? kFullWarp : (left > 0 ? (1u << left) - 1 : 0);
  const auto assign = [&](uint32_t winner, int position) {
    const int query = static_cast<int>(winner >> kQueryShift) % kWindow;
    if (lane == query / kWarpSize) unassigned &= ~(1u << query % kWarpSize);
#pragma unroll
    for (int r = 0; r < kEach; ++r)
      if (query == t + r * Traits::kGreedyThreads) {
        place[r] = position;
        added += static_cast<int>((key[r] - base[r]) >> kCostShift);
        base[r] |= kAssigned;
      }
  };

  int buffer = 0;
  for (int begin = 0; begin < queries; begin += group_size) {
    const int end = min(begin + group_size, queries);
    const int lowest = lane * kWarpSize + __ffs(static_cast<int>(unassigned)) - 1;
    const uint32_t seed = __reduce_min_sync(kFullWarp, unassigned != 0 ? static_cast<uint32_t>(lowest) : kFullWarp);
    uint32_t winner = seed * ((1u << kQueryShift) + kStride * 4);
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      load_row(shared.rows + (t + r * Traits::kGreedyThreads) * kStride, remaining[r]);
      key[r] = base[r] + own_cost[r];
    }
    for (int position = begin + 1; position < end; ++position) {
      // Everything that the next choice does not need waits behind the load of the winner's row.
      uint32_t row[kWords];
      load_row(shared.rows + (winner & kRowMask) / 4, row);
      assign(winner, position - 1);
      uint32_t least = ~0u;
#pragma unroll
      for (int r = 0; r < kEach; ++r) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) remaining[r][w] &= ~row[w];
        key[r] = add_bits<kCostShift>(base[r], remaining[r]);
        least = min(least, key[r]);
      }
      winner = least_key<kWindow>(shared, least, buffer);
    }
    assign(winner, end - 1);
  }

  bool keep = false;
  if (compare) {
    const int total = Traits::kGreedyWarps > 1 ? block_sum<Traits::kWarps>(added, shared.sums[1])
                                               : __reduce_add_sync(kFullWarp, added);
    const int original = sums & ((1 << kSinglesShift) - 1), singles = sums >> kSinglesShift;
    keep = guard && total >= original;
    if (visits != nullptr && t == 0) {
      atomicAdd(visits, static_cast<unsigned long long>(original + singles));
      atomicAdd(visits + 1, static_cast<unsigned long long>((keep ? original : total) + singles));
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const int query = t + r * Traits::kGreedyThreads;
    if (query < queries) out[keep ? query : place[r]] = first + query;
  }
}

// ---------------------------------------------------------------- Kernel
// grid (tokens / window + requests + 1, kv_heads), block kWindow
template <int kWindow>
__global__ void __launch_bounds__(kWindow, 4)
    regroup_kernel(const int32_t* __restrict__ topk, int64_t head_stride, int64_t row_stride, int k, bool vectors,
                   Lengths lengths, int group_size, int page_size, int capacity, bool guard,
                   int32_t* __restrict__ perm, unsigned long long* __restrict__ visits) {
  using Traits = RegroupTraits<kWindow>;
  PW_SHARED(typename Traits::Shared, shared);
  let_next_kernel_start();  // union preparation may take its place already
  const int t = threadIdx.x;
  const Location at = locate(lengths, static_cast<int>(blockIdx.x), [](int rows) { return ceil_div(rows, kWindow); });
  if (at.request < 0) return;
  const int first = at.begin + at.unit * kWindow;
  const int queries = min(kWindow, at.end - first);
  int ids[kMaxTopk];
#pragma unroll
  for (int j = 0; j < kMaxTopk; ++j) ids[j] = -1;
  if (t < queries) load_ids(topk + blockIdx.y * head_stride + (first + t) * row_stride, 0, k, vectors, ids);
  clear_table<Traits::kThreads>(shared.table);  // while the ids are on their way

  int32_t* const out = perm + static_cast<int64_t>(blockIdx.y) * lengths.tokens + first;
  const bool padding = at.request == lengths.requests;
  const int pages = padding ? 0 : ceil_div(sequence_length(lengths, at), page_size);
  if (padding || (capacity > 0 && pages > capacity)) {
    if (t < queries) out[t] = first + t;
    return;
  }
  drop_invalid(pages, ids);
  const int bits = name_pages<kWindow>(shared, pages, ids);
  if (bits <= 4 * 32)
    order_window<kWindow, 4>(shared, ids, first, queries, group_size, guard, out, visits);
  else if (bits <= 6 * 32)
    order_window<kWindow, 6>(shared, ids, first, queries, group_size, guard, out, visits);
  else if (bits <= 8 * 32)
    order_window<kWindow, 8>(shared, ids, first, queries, group_size, guard, out, visits);
  else if (bits <= 16 * 32)
    order_window<kWindow, 16>(shared, ids, first, queries, group_size, guard, out, visits);
  else
    order_window<kWindow, Traits::kMaxWords>(shared, ids, first, queries, group_size, guard, out, visits);
}

// ---------------------------------------------------------------- Launcher
// topk int32 [kv_heads, tokens, k] with the strides given in elements (the ids of a row are contiguous), k <= 16;
// window 64 or 128; group_size 1..32. capacity 0: every request is regrouped; > 0: a request of more logical pages
// keeps its original order. guard_window: a window keeps its original order unless the new one has fewer page visits.
// Writes perm int32 [kv_heads, tokens], contiguous; padding rows get their own id. visits uint64 [2], or null: page
// visits in the original order and in the one written are added; padding rows, and requests past the capacity, add
// nothing. Asynchronous; reads nothing on the host.
inline cudaError_t launch_regroup(const int32_t* topk, int64_t topk_head_stride, int64_t topk_row_stride, int kv_heads,
                                  int k, Lengths lengths, int window, int group_size, int page_size, int capacity,
                                  bool guard_window, int32_t* perm, unsigned long long* visits,
                                  cudaStream_t stream) {
  if (k < 0 || k > kMaxTopk || (window != 64 && window != 128) || group_size < 1 || group_size > kMaxRegroupGroup ||
      page_size < 1 || capacity < 0 || lengths.requests < 0)
    return cudaErrorInvalidValue;
  if (kv_heads <= 0 || lengths.tokens <= 0) return cudaSuccess;
  const bool vectors = rows_are_vectors(topk, topk_head_stride, topk_row_stride, k);
  const dim3 grid(lengths.tokens / window + lengths.requests + 1, kv_heads);
  if (window == 64)
    PW_LAUNCH(regroup_kernel<64>, grid, dim3(64), stream, topk, topk_head_stride, topk_row_stride, k, vectors, lengths,
              group_size, page_size, capacity, guard_window, perm, visits);
  else
    PW_LAUNCH(regroup_kernel<128>, grid, dim3(128), stream, topk, topk_head_stride, topk_row_stride, k, vectors,
              lengths, group_size, page_size, capacity, guard_window, perm, visits);
  return cudaGetLastError();
}

}  // namespace pw
