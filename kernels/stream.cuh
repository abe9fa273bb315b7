// Streamed union attention: what union8.cuh computes, to the bit, from one producer warpgroup that streams pages through a deep ring to
// independent consumer warpgroups.
//
// One persistent CTA an SM draws groups from a queue. kConsumers warpgroups own 4 queries x 16 heads of the group each, and share
// its pages but not their pace: the ring is kStages pages deep, and a consumer none of whose queries picked a page passes it by. The
// producer warpgroup copies pages (one thread) and transposes V in place (all its warps), so neither is in a consumer's chain. A consumer
// issues the next page's S before this page's P V: the softmax of the one runs while the tensor cores do the other.
//
//   Barrier of a stage   completes when                                       waited for by
//   k_ready              K of the page has landed                             consumers, before S = Q K^T
//   v_landed             V of the page has landed                             producer warps, before they transpose it
//   v_ready              all producer warps have written V^T                  consumers, before O += P V
//   slot_free            all producer and consumer warps are done with it     the loading thread
//
// Timeline of a consumer, pages n and n + 1 both picked:
//   wait k_ready(n + 1), v_ready(n) | issue S(n + 1), issue P V(n) | wait S | softmax(n + 1) | wait P V | free slot n | rescale O, round P
#pragma once

#include "attention.cuh"

namespace pw {

// ---------------------------------------------------------------- Types

template <int kConsumers_>
struct StreamTraits {
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kGroupSize = kConsumers * RowTile::kQueries;
  static constexpr int kMaxUnion = kGroupSize * 16;  // top-k of at most 16 pages a query
  static constexpr int kThreads = RowTile::kThreads * (kConsumers + 1);
  static constexpr int kStages = 6;     // 6 x 32 KiB of the SM's 227 KiB
  // Pages copied ahead of the one that is transposed. More is slower: the producer would wait for a slot before it transposes a page
  // that has landed. (Loading into every free slot without waiting was slower still.)
  static constexpr int kLookahead = 3;
  // setmaxnreg deals the registers of the launch (168 a thread in three warpgroups: 504) out anew. A sum above that would hang: the
  // last warpgroup waits for registers that nobody gives back.
  static constexpr int kLaunchRegisters = 168;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "more registers than the launch gives");
};

// What the ring carries beside K and V.
struct alignas(16) StreamPage {
  int32_t first_token;  // position of the page's first token
  uint32_t mask;        // bit r: slot r of the group picked the page and sees some of it; kLastOfGroup
  int32_t last_token;   // last token of the page that any slot of the group sees
  int32_t work;         // kv_head * groups + group; kNoWork: the queue is empty
};
constexpr uint32_t kLastOfGroup = 1u << 31;
constexpr int32_t kNoWork = -1;

template <class Traits>
struct alignas(1024) StreamSharedStorage {
  uint8_t k[Traits::kStages][RowTile::kTileBytes];
  uint8_t v[Traits::kStages][RowTile::kTileBytes];  // becomes V^T
  uint8_t q[Traits::kConsumers][RowTile::kQBytes];
  float row_scale[Traits::kConsumers][RowTile::kRows];
  StreamPage pages[Traits::kStages];
  uint64_t k_ready[Traits::kStages];
  uint64_t v_landed[Traits::kStages];
  uint64_t v_ready[Traits::kStages];
  uint64_t slot_free[Traits::kStages];
};

// Place in the endless sequence of pages that pass through the ring.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A page's entry, read by lane 0 and passed to the warp.
__device__ __forceinline__ StreamPage read_by_first_lane(const StreamPage& entry, int lane) {
  StreamPage page{};
  if (lane == 0) page = entry;
  page.first_token = __shfl_sync(~0u, page.first_token, 0);
  page.mask = __shfl_sync(~0u, page.mask, 0);
  page.last_token = __shfl_sync(~0u, page.last_token, 0);
  page.work = __shfl_sync(~0u, page.work, 0);
  return page;
}

// ---------------------------------------------------------------- Producer

// Copies the pages of one group after another into the ring. Run by a whole warp; lane 0 waits and issues, the lanes together
// fetch 32 entries of a page list at a time.
template <class Traits>
struct PageLoader {
  const CUtensorMap& k_map;
  const CUtensorMap& v_map;
  const UnionAttentionParams& p;
  StreamSharedStorage<Traits>& shared;
  int lane, work_items;
  RingPosition<Traits::kStages> ring;
  int work = kNoWork, next_work = 0;  // next_work is drawn one group ahead, to hide the queue's latency
  int index = 0, count = 0, last_visible = 0;
  int entry_slot = 0, entry_first_token = 0;  // this lane's entry of the page list
  uint32_t entry_mask = 0;

  __device__ __forceinline__ int draw() const {
    int drawn = 0;
    if (lane == 0) drawn = atomicAdd(p.queue, 1);
    return __shfl_sync(~0u, drawn, 0);
  }

  // Opens the next group that has a query. False: the queue is empty.
  __device__ __forceinline__ bool open_group() {
    while (true) {
      work = next_work;
      if (work >= work_items) return false;
      next_work = draw();
      const bool in_group = lane < Traits::kGroupSize;
      const int64_t slot = static_cast<int64_t>(work) * Traits::kGroupSize + lane;
      const int query = in_group ? p.queries[slot] : -1;
      const int limit = in_group ? p.limits[slot] : -1;
      if (__all_sync(~0u, query < 0)) continue;  // a spare group
      last_visible = __reduce_max_sync(~0u, limit);
      // A group that sees nothing still passes through, as one page without members: its rows have to be written.
      count = max(min(p.counts[work], Traits::kMaxUnion), 1);
      index = 0;
      return true;
    }
  }

  __device__ __forceinline__ void fetch_entries() {
    const int64_t list = static_cast<int64_t>(work) * p.max_union;
    const int entry = index + lane;
    entry_mask = 0;
    entry_slot = entry_first_token = 0;
    if (entry < min(p.counts[work], Traits::kMaxUnion)) {
      entry_slot = p.slots[list + entry];
      entry_first_token = p.pages[list + entry] * RowTile::kPageSize;
      entry_mask = p.masks[list + entry];
      for (int r = 0; r < Traits::kGroupSize; ++r)
        if (p.limits[static_cast<int64_t>(work) * Traits::kGroupSize + r] < entry_first_token) entry_mask &= ~(1u << r);
      if (entry_slot < 0) entry_mask = 0;  // unreadable: page 0 is copied instead, and nobody looks
      entry_slot = max(entry_slot, 0);
    }
  }

  // Copies one page, or passes the end of the queue on. False: that was the end.
  __device__ __forceinline__ bool load() {
    const bool more = index < count || open_group();
    if (more && index % 32 == 0) fetch_entries();
    const int from = index % 32;
    const int slot = __shfl_sync(~0u, entry_slot, from), first_token = __shfl_sync(~0u, entry_first_token, from);
    const uint32_t mask = __shfl_sync(~0u, entry_mask, from);
    ++index;
    if (lane == 0) {
      const int s = ring.stage;
      ptx::mbarrier_wait(&shared.slot_free[s], ring.phase ^ 1);  // a barrier that was never used counts as free
      shared.pages[s] = {first_token, mask | (index == count ? kLastOfGroup : 0), last_visible - first_token, more ? work : kNoWork};
      if (more) {
        const int kv_head = work / p.groups;
        ptx::mbarrier_arrive_expect_tx(&shared.k_ready[s], RowTile::kTileBytes);
        ptx::tma_load_3d(shared.k[s], &k_map, 0, kv_head, slot * RowTile::kPageSize, &shared.k_ready[s]);
        ptx::mbarrier_arrive_expect_tx(&shared.v_landed[s], RowTile::kTileBytes);
        ptx::tma_load_3d(shared.v[s], &v_map, 0, kv_head, slot * RowTile::kPageSize, &shared.v_landed[s]);
      } else {
        ptx::mbarrier_arrive(&shared.k_ready[s]);
        ptx::mbarrier_arrive(&shared.v_landed[s]);
      }
    }
    __syncwarp();
    ring.advance();
    return more;
  }
};

template <class Traits>
__device__ __forceinline__ void produce(const CUtensorMap& k_map, const CUtensorMap& v_map, const UnionAttentionParams& p,
                                        StreamSharedStorage<Traits>& shared, int work_items, int warp, int lane) {
  PageLoader<Traits> loader{k_map, v_map, p, shared, lane, work_items};
  bool loading = warp == 0;
  if (loading) loader.next_work = loader.draw();
  int ahead = 0;  // pages copied and not yet transposed (warp 0)
  RingPosition<Traits::kStages> ring;
#pragma unroll 1
  while (true) {
    for (; loading && ahead <= Traits::kLookahead; ++ahead) loading = loader.load();
    --ahead;
    const int s = ring.stage;
    ptx::mbarrier_wait(&shared.v_landed[s], ring.phase);
    const StreamPage page = read_by_first_lane(shared.pages[s], lane);
    if (page.work == kNoWork) break;
    transpose_v_in_place(shared.v[s], warp, lane, page.last_token);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(&shared.v_ready[s]);
      ptx::mbarrier_arrive(&shared.slot_free[s]);
    }
    ring.advance();
  }
  // The last CTA that has drawn its end leaves the queue as it found it, for the next launch.
  if (threadIdx.x == 0 && atomicAdd(p.queue + 1, 1) == static_cast<int>(gridDim.x) - 1) {
    p.queue[0] = 0;
    p.queue[1] = 0;
  }
}

// ---------------------------------------------------------------- Consumer

template <class Traits>
struct Consumer {
  const UnionAttentionParams& p;
  StreamSharedStorage<Traits>& shared;
  int number, warp, lane;
  RingPosition<Traits::kStages> ring;
  bool group_open = false;  // pages of the group are left in the ring

  __device__ __forceinline__ uint32_t members(const StreamPage& page) const { return (page.mask >> (number * RowTile::kQueries)) & 0xF; }
  __device__ __forceinline__ bool is_member(const StreamPage& page) const { return (members(page) >> warp) & 1; }

  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.slot_free[stage]);
  }

  // The lane that hands the slot back is the one that reads what lies beside it.
  __device__ __forceinline__ StreamPage read_page(int stage) const { return read_by_first_lane(shared.pages[stage], lane); }

  // The next page of the group that one of this consumer's queries picked, among the next `most`; others are passed by.
  __device__ __forceinline__ bool next_page(RingPosition<Traits::kStages>& at, StreamPage& page, int most) {
    for (int looked = 0; group_open && looked < most; ++looked) {
      at = ring;
      ptx::mbarrier_wait(&shared.k_ready[at.stage], at.phase);
      page = read_page(at.stage);
      group_open = (page.mask & kLastOfGroup) == 0;
      ring.advance();
      if (members(page) != 0) return true;
      release(at.stage);
    }
    return false;
  }
};

template <class Traits>
__device__ __forceinline__ void consume(const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared, int number, int warp,
                                        int lane) {
  const float softmax_scale_log2 = p.softmax_scale_log2 * (p.k_scale_device ? *p.k_scale_device : 1.0f);
  const uint64_t q_descriptor = ptx::wgmma_descriptor(shared.q[number]);
  Consumer<Traits> self{p, shared, number, warp, lane};
#pragma unroll 1
  while (true) {
    // -------- The next group: its first page is in the ring
    ptx::mbarrier_wait(&shared.k_ready[self.ring.stage], self.ring.phase);
    const int work = self.read_page(self.ring.stage).work;
    if (work == kNoWork) break;
    const int kv_head = work / p.groups;
    const int64_t slot = static_cast<int64_t>(work) * Traits::kGroupSize + number * RowTile::kQueries + warp;
    const int query = p.queries[slot], limit = p.limits[slot];
    ptx::named_barrier_sync(1 + number, RowTile::kThreads);  // every warp is past the last group's S
    quantise_query(p, shared.q[number], shared.row_scale[number], query, kv_head, warp, lane, softmax_scale_log2);
    ptx::fence_proxy_async_shared();
    ptx::named_barrier_sync(1 + number, RowTile::kThreads);
    const float* row_scale = shared.row_scale[number] + warp * RowTile::kHeadsPerKvHead + (lane >> 2);
    const float scale[2] = {row_scale[0], row_scale[8]};
    RowState state[2];
    float o[ptx::kAccumulators];
#pragma unroll
    for (int i = 0; i < ptx::kAccumulators; ++i) o[i] = 0.0f;

    // -------- Its pages
    self.group_open = true;
    RingPosition<Traits::kStages> now;  // the page whose probabilities wait for their P V
    StreamPage page;
    while (self.next_page(now, page, Traits::kMaxUnion)) {
      float logits[ptx::kAccumulators], correction[2];
      uint32_t probabilities[4][4] = {};
      auto softmax = [&] {
        if (!self.is_member(page)) return;
        const int last_key = limit - page.first_token;
        if (last_key < RowTile::kPageSize - 1) mask_future_keys(logits, last_key, lane);
        correction[0] = softmax_row<0>(logits, state[0], scale[0]);
        correction[1] = softmax_row<1>(logits, state[1], scale[1]);
      };
      auto finish_softmax = [&] {
        if (self.is_member(page)) {
          rescale(o, correction);
          to_probabilities(logits, probabilities);
        } else {
#pragma unroll
          for (int i = 0; i < 16; ++i) probabilities[i / 4][i % 4] = 0;
        }
      };
      ptx::pin_registers(logits);
      ptx::wgmma_fence();
      issue_logits(logits, q_descriptor, ptx::wgmma_descriptor(shared.k[now.stage]));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(logits);
      softmax();
      finish_softmax();
      // While it holds this page's slot, at most the rest of the ring can arrive: then it must give it back first.
      RingPosition<Traits::kStages> next;
#pragma unroll 1
      while (self.next_page(next, page, Traits::kStages - 1)) {
        ptx::mbarrier_wait(&shared.v_ready[now.stage], now.phase);
        ptx::pin_registers(logits);
        ptx::pin_registers(o);
        ptx::wgmma_fence();
        issue_logits(logits, q_descriptor, ptx::wgmma_descriptor(shared.k[next.stage]));
        ptx::wgmma_commit();
        issue_values(o, probabilities, ptx::wgmma_descriptor(shared.v[now.stage]));
        ptx::wgmma_commit();
        ptx::wgmma_wait<1>();
        ptx::pin_registers(logits);
        softmax();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(o);
        self.release(now.stage);
        finish_softmax();
        now = next;
      }
      ptx::mbarrier_wait(&shared.v_ready[now.stage], now.phase);
      ptx::pin_registers(o);
      ptx::wgmma_fence();
      issue_values(o, probabilities, ptx::wgmma_descriptor(shared.v[now.stage]));
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin_registers(o);
      self.release(now.stage);
    }
    if (query >= 0) write_query(p, o, state, query, kv_head, lane);
  }
}

// ---------------------------------------------------------------- Kernel

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    stream_attention_kernel(const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                            const __grid_constant__ UnionAttentionParams p, int work_items) {
  extern __shared__ uint8_t raw_shared[];
  auto& shared = *reinterpret_cast<StreamSharedStorage<Traits>*>(raw_shared);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / RowTile::kThreads, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % RowTile::kWarps, 0), lane = threadIdx.x & 31;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&k_map);
    ptx::prefetch_tensor_map(&v_map);
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::mbarrier_init(&shared.k_ready[s], 1);
      ptx::mbarrier_init(&shared.v_landed[s], 1);
      ptx::mbarrier_init(&shared.v_ready[s], RowTile::kWarps);
      ptx::mbarrier_init(&shared.slot_free[s], RowTile::kWarps * (Traits::kConsumers + 1));
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    ptx::set_max_registers_down<Traits::kProducerRegisters>();
    produce<Traits>(k_map, v_map, p, shared, work_items, warp, lane);
  } else {
    ptx::set_max_registers_up<Traits::kConsumerRegisters>();
    consume<Traits>(p, shared, warpgroup - 1, warp, lane);
  }
}

// ---------------------------------------------------------------- Host

template <class Traits>
cudaError_t launch_stream_attention(const CUtensorMap& k_map, const CUtensorMap& v_map, const UnionAttentionParams& params, int kv_heads,
                                    int processors, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(StreamSharedStorage<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a CTA");
  auto* kernel = stream_attention_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int work_items = params.groups * kv_heads;
  kernel<<<min(processors, work_items), Traits::kThreads, kSharedBytes, stream>>>(k_map, v_map, params, work_items);
  return cudaGetLastError();
}

}  // namespace pw
