// Streamed union attention: what union8.cuh computes (with one term to the bit), with pages streamed through a deep ring to independent
// consumer warpgroups. V of an E4M3 cache comes as transposed tiles (value_tiles.cuh), so nothing but copies stands between L2 and the tensor
// cores. A BF16 cache is multiplied in BF16, V as it lies in the cache; a page goes in two blocks of 64 tokens then (in E4M3 a block is a page).
//
// One persistent CTA an SM draws groups from a queue. kConsumers warpgroups own a tile of the group each, 4 queries x 16 heads or, where a KV
// head has no more than 8, 8 x 8: a group has twice the queries then, and needs fewer rounds a query. They share the group's blocks but not their
// pace: the ring is kStages blocks deep, and a consumer skips blocks that none of its queries picked. The producer warpgroup's first warp draws
// groups and copies blocks, in BF16 of K only: V has a warp of its own. The others quantise the queries of the next group while this one's blocks
// are walked.
//
//   Barrier                completes when                                      waited for by
//   k_ready   [stage]      K of the block has landed                           consumers, before S = Q K^T; V's warp, before it loads V
//   v_ready   [stage]      V^T or V of the block has landed                    consumers, before O += P V; the loading warp, before it
//                                                                              announces the next block of the slot
//   issued    [consumer]   the consumer's next block is on its way: from now    the consumer, before k_ready
//             [own block]  on k_ready's parity tells it from the block before
//                          in the same slot, which the consumer may have
//                          skipped
//   k_free, v_free [stage] all consumers that have a member are done with it   the loading warps
//   listed, list_read      the group's pages are listed; V's warp is done      V's warp; the loading warp, before it lists others
//                          with the list
//   last_landed            a group's last block of V has landed                V's warp, which clears what nobody may see of it
//   drawn     [draw]       a group's number is written                         the quantising warps
//   read      [draw]       they have read it                                   the loading warp
//   ready     [group slot] the group's queries are quantised, its first        consumers
//                          pages known
//   done      [group slot] all consumers are past the group's last P V and     the loading warp and the quantising warps
//                          have read its queries
//
// Timeline of a consumer, blocks n and n + 1 its own:
//   wait issued, k_ready(n + 1), v_ready(n) | issue S(n + 1), P V(n) | wait S | probabilities of n + 1, one query of the warp's two |
//   wait P V | free V(n), K(n + 1) | raise the reference if need be; the same for the other query if it picked the page too; P to its place
// Probabilities are computed from the reference as it is, without a maximum of the block, and again after a raise. A group's first block,
// and one that is far behind (NextBlock::kFar), begins with S alone: P V of the block before it has ended.
// The softmax of one consumer runs while the tensor cores work for the other; the first query's also beside the own P V.
//
// With two terms (kTerms, precision high) P V of a page is summed apart, from zero and in the registers of S, and added to O in FP32: O as
// an accumulator keeps 14 bits, so that it would cut off what late pages add, the second terms first. Both products go in halves, of the keys
// and of the dimensions, so that the registers change hands without a gap on the tensor cores:
//   issue both halves of P V(n) | wait issued, k_ready(n + 1) | wait P V's first half, add it | issue the first half of S(n + 1) |
//   wait P V's second half, add it | free V(n) | issue the second half of S(n + 1) | wait S's first half | half of one query's
//   probabilities | wait S's second half | free K(n + 1) | the other half; as above from the reference on | wait v_ready(n + 1)
#pragma once

#include "attention.cuh"
#include "ptx/dependent_launch.cuh"

namespace pw {

// ---------------------------------------------------------------- Types

template <int kConsumers_, class Math_, class Rows_>
struct StreamTraits {
  using Math = Math_;
  using Rows = Rows_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr int kGroupSize = kConsumers * Rows::kQueries;
  using Mask = UnionMask<kGroupSize>;
  static constexpr int kMaxUnion = kGroupSize * kMaxTopk;
  static constexpr int kThreads = RowTile::kThreads * (kConsumers + 1);
  static constexpr int kBlocksPerPage = Math::kBlocksPerPage;
  // Of 32 KiB; with Q's 32 or 64 KiB 224 of the SM's 227 KiB in groups of 8. The list of a group of 16 takes one of them.
  static constexpr int kStages = (Math::kQBytes == RowTile::kQBytes ? 6 : 5) - (kGroupSize > 8);
  static constexpr int kGroupSlots = 2;  // of quantised queries: the group that is walked and the next
  static constexpr int kDraws = 2;       // numbers of groups on their way to the quantising warps
  // Blocks of a group that are left to load when the next group is drawn: long enough before for its queries to be quantised in time, and
  // as late as possible, because what a CTA has drawn at the end no idle CTA can take over.
  static constexpr int kDrawAhead = 12 * kBlocksPerPage;
  static constexpr int kIssued = 8;      // at least kStages: no more blocks than that are on their way
  // One warp loads K and V; in BF16, of which a block is half as much work, it would hold up everybody else, and V has a warp of its own. (In
  // E4M3 that costs 2 to 4 %: V comes later then, and two warps are left to quantise.)
  static constexpr int kLoadingWarps = Math::kBf16 ? 2 : 1;
  static constexpr int kQuantisingWarps = RowTile::kWarps - kLoadingWarps;
  // setmaxnreg deals the registers of the launch (168 a thread in three warpgroups: 504) out anew. A sum above that would hang: the
  // last warpgroup waits for registers that nobody gives back.
  static constexpr int kLaunchRegisters = 168;
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <= (kConsumers + 1) * kLaunchRegisters,
                "more registers than the launch gives");
  static_assert(kGroupSize <= 16, "bits of a mask");

  // Consumer c's part of a mask over the group's slots.
  __device__ __forceinline__ static uint32_t members_of(uint32_t mask, int c) {
    return (mask >> (c * Rows::kQueries)) & ((1u << Rows::kQueries) - 1);
  }
};

// Where a consumer goes next. Every block carries this for each consumer, and every group the first one.
struct alignas(8) NextBlock {
  uint32_t place;  // number of all blocks that go through the ring, of which block n uses slot n % kStages; kSecondHalf; kFar
  uint32_t meta;   // members among the consumer's queries, or 0: no block; logical page << kPageShift

  __device__ __forceinline__ uint32_t number() const { return place & kNumber; }
  __device__ __forceinline__ uint32_t members() const { return meta & kMembers; }
  __device__ __forceinline__ bool is_far() const { return (place & kFar) != 0; }
  template <class Math>
  __device__ __forceinline__ int first_token() const {
    const int half = Math::kBlocksPerPage > 1 && (place & kSecondHalf) != 0 ? Math::kBlockTokens : 0;
    return static_cast<int>(meta >> kPageShift) * RowTile::kPageSize + half;
  }

  static constexpr uint32_t kMembers = 0xFF;
  static constexpr int kPageShift = 8;  // positions are 32 bits wide, so that 24 hold a page's number
  static constexpr uint32_t kSecondHalf = 1u << 30;
  // Further behind this block than the ring is deep. It may only be issued once V of this block is freed, so P V must not wait for it.
  static constexpr uint32_t kFar = 1u << 31;
  static constexpr uint32_t kNumber = kSecondHalf - 1;  // of a CTA's whole queue: a billion blocks
};

template <class Traits>
struct StreamGroup {
  int32_t work;  // kv_head * groups + group; kNoWork: the queue is empty
  int32_t queries[Traits::kGroupSize];
  int32_t limits[Traits::kGroupSize];
  float row_scale[Traits::kConsumers][RowTile::kRows];
  NextBlock first[Traits::kConsumers];
};
constexpr int32_t kNoWork = -1;

// A page of the group that is loaded: the physical one, the logical one, and bit r of two masks: slot r of the group picked the page and sees
// some of it; it sees some of the page's second half (BF16).
template <int kGroupSize>
struct alignas(16) ListedPage {
  uint32_t physical, logical, masks;

  __device__ __forceinline__ ListedPage(uint32_t slot, uint32_t page, uint32_t mask, uint32_t late)
      : physical(slot), logical(page), masks(late << 16 | mask) {}
  __device__ __forceinline__ uint32_t slot() const { return physical; }
  __device__ __forceinline__ uint32_t page() const { return logical; }
  __device__ __forceinline__ uint32_t mask() const { return masks & 0xFFFF; }
  __device__ __forceinline__ uint32_t late() const { return masks >> 16; }
};
template <>
struct alignas(8) ListedPage<8> {
  uint32_t slot_and_late, page_and_mask;  // a page's number has 24 bits, see NextBlock; no memory holds as many physical pages

  __device__ __forceinline__ ListedPage(uint32_t slot, uint32_t page, uint32_t mask, uint32_t late)
      : slot_and_late(slot << 8 | late), page_and_mask(page << 8 | mask) {}
  __device__ __forceinline__ uint32_t slot() const { return slot_and_late >> 8; }
  __device__ __forceinline__ uint32_t page() const { return page_and_mask >> 8; }
  __device__ __forceinline__ uint32_t mask() const { return page_and_mask & 0xFF; }
  __device__ __forceinline__ uint32_t late() const { return slot_and_late & 0xFF; }
};

// The list's group.
struct ListHead {
  int32_t work;    // kNoWork: there are no more
  int32_t blocks;
  int32_t hidden;  // tokens of the last block that nobody of the group sees; 0 or less: none
};

template <class Traits>
struct alignas(1024) StreamSharedStorage {
  uint8_t k[Traits::kStages][RowTile::kTileBytes];
  uint8_t v[Traits::kStages][RowTile::kTileBytes];  // V^T of a page in E4M3, V of half a page in BF16
  uint8_t q[Traits::kGroupSlots][Traits::kConsumers][Traits::Math::kQBytes];
  ListedPage<Traits::kGroupSize> list[Traits::kMaxUnion];  // the loading warps' own, as all up to `next` but `groups`
  static_assert(Traits::kMaxUnion <= 256, "a distance in the list fits a byte");
  uint8_t distance[Traits::kMaxUnion][Traits::kConsumers];
  ListHead head;
  StreamGroup<Traits> groups[Traits::kGroupSlots];
  NextBlock next[Traits::kStages][Traits::kConsumers];
  int32_t draws[Traits::kDraws];
  uint64_t k_ready[Traits::kStages], v_ready[Traits::kStages];
  uint64_t k_free[Traits::kStages], v_free[Traits::kStages];
  uint64_t issued[Traits::kConsumers][Traits::kIssued];
  uint64_t ready[Traits::kGroupSlots], done[Traits::kGroupSlots];
  uint64_t drawn[Traits::kDraws], read[Traits::kDraws];
  uint64_t listed, list_read;
  uint64_t last_landed;  // a group's last block of V, where what lies behind the group's sight is cleared before anybody is told
};

// Place in the endless sequence of things that pass through a ring.
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

// ---------------------------------------------------------------- Loading warp

// Entries of a group's page list, spread over the warp: lane l holds entries l, l + 32, ... behind the first. Everything is read before
// anything is needed.
template <class Traits>
struct GroupPages {
  static constexpr int kChunks = 4, kEntries = 32 * kChunks;  // all of a group of 8, half of a group of 16, which seldom has more
  static_assert(Traits::kMaxUnion == kEntries || Traits::kMaxUnion == 2 * kEntries, "one half or two");
  int limit;  // of the slot that is this lane's number
  int slot[kChunks], page[kChunks];
  uint32_t mask[kChunks];

  __device__ __forceinline__ void fetch(const UnionAttentionParams& p, int64_t row, int first, int lane) {
    limit = lane < Traits::kGroupSize ? __ldg(p.limits + row * Traits::kGroupSize + lane) : -1;
    const int64_t own = row * p.max_union + first + lane;
    const int32_t *own_slot = p.slots + own, *own_page = p.pages + own;
    const auto* own_mask = static_cast<const typename Traits::Mask*>(p.masks) + own;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool there = first + lane + 32 * i < p.max_union;  // behind the union masks are 0
      slot[i] = there ? __ldg(own_slot + 32 * i) : -1;
      page[i] = there ? __ldg(own_page + 32 * i) : 0;
      mask[i] = there ? __ldg(own_mask + 32 * i) : 0;
    }
  }

  // Whether the union may go on behind these entries: the last one is used.
  __device__ __forceinline__ bool are_full() const { return __shfl_sync(~0u, mask[kChunks - 1], 31) != 0; }

  // The last position that a query of the group sees. Called by a whole warp.
  __device__ __forceinline__ int last_position() const { return __reduce_max_sync(~0u, limit); }

  // The bits of queries that see something of the second half of their chunk's page.
  __device__ __forceinline__ uint32_t late_mask(int chunk) const {
    uint32_t late = mask[chunk];
#pragma unroll
    for (int r = 0; r < Traits::kGroupSize; ++r)
      if (__shfl_sync(~0u, limit, r) < page[chunk] * RowTile::kPageSize + RowTile::kPageSize / 2) late &= ~(1u << r);
    return late;
  }

  // Clears the bits of queries that see nothing of a page, and of pages that cannot be read.
  __device__ __forceinline__ void drop_unseen() {
#pragma unroll
    for (int r = 0; r < Traits::kGroupSize; ++r) {
      const int seen = __shfl_sync(~0u, limit, r);
#pragma unroll
      for (int i = 0; i < kChunks; ++i)
        if (seen < page[i] * RowTile::kPageSize) mask[i] &= ~(1u << r);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (slot[i] < 0) mask[i] = 0;
  }
};

// One thread's work: draws the next group and tells the quantising warps. Returns its number or kNoWork.
template <class Traits>
__device__ __forceinline__ int draw_group(const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared, int work_items,
                                          RingPosition<Traits::kDraws>& ring) {
  const int place = atomicAdd(p.queue, 1);
  int work = kNoWork;
  if (place < work_items) work = p.order == nullptr ? place : __ldg(p.order + place);
  ptx::mbarrier_wait(&shared.read[ring.stage], ring.phase ^ 1);  // a barrier that was never used counts as free
  shared.draws[ring.stage] = work;
  ptx::mbarrier_arrive(&shared.drawn[ring.stage]);
  ring.advance();
  return work;
}

// Writes the pages that somebody sees behind the first `count` entries of the group's list, in the order of the union; returns how many the
// list then has.
template <class Traits>
__device__ __forceinline__ int list_seen_pages(const GroupPages<Traits>& group, StreamSharedStorage<Traits>& shared, int count, int lane) {
#pragma unroll
  for (int i = 0; i < group.kChunks; ++i) {
    const bool seen = group.mask[i] != 0;
    const uint32_t all = __ballot_sync(~0u, seen);
    const int entry = count + __popc(all & ((1u << lane) - 1));
    const uint32_t late = Traits::kBlocksPerPage > 1 ? group.late_mask(i) : 0;
    if (seen) shared.list[entry] = {static_cast<uint32_t>(group.slot[i]), static_cast<uint32_t>(group.page[i]), group.mask[i], late};
    count += __popc(all);
  }
  return count;
}

// Writes for each of the list's `count` pages and each consumer the distance to the next page that has a member of the consumer (0: none).
// Returns the number of blocks: all of the pages but a second half of the last that nobody sees; first[c]: first page of consumer c, or -1.
template <class Traits>
__device__ __forceinline__ int link_pages(StreamSharedStorage<Traits>& shared, int count, int lane, int (&first)[Traits::kConsumers]) {
  __syncwarp();
  int next[Traits::kConsumers];  // the first page of each consumer behind the chunk
#pragma unroll
  for (int c = 0; c < Traits::kConsumers; ++c) next[c] = -1;
#pragma unroll 1
  for (int begin = (count - 1) / 32 * 32; begin >= 0; begin -= 32) {
    const int entry = begin + lane;
    const uint32_t mask = entry < count ? shared.list[entry].mask() : 0;
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) {
      const uint32_t own = __ballot_sync(~0u, Traits::members_of(mask, c) != 0);
      const uint32_t later = lane == 31 ? 0 : own & (~0u << (lane + 1));
      const int following = later != 0 ? begin + __ffs(later) - 1 : next[c];
      if (entry < count) shared.distance[entry][c] = following < 0 ? 0 : following - entry;
      if (own != 0) next[c] = begin + __ffs(own) - 1;
    }
  }
#pragma unroll
  for (int c = 0; c < Traits::kConsumers; ++c) first[c] = next[c];
  __syncwarp();
  if constexpr (Traits::kBlocksPerPage > 1) return 2 * count - (count > 0 && shared.list[count - 1].late() == 0);
  return count;
}

// What the copiers of K and of V share: one thread's work each.
template <class Traits>
struct BlockCopier {
  using Math = typename Traits::Math;
  static constexpr int kBlocksPerPage = Traits::kBlocksPerPage;

  StreamSharedStorage<Traits>& shared;
  RingPosition<Traits::kStages> ring;

  // A block as the loop below counts them, from the group's first page on: the page of the list it is of, and its members.
  struct Block {
    ListedPage<Traits::kGroupSize> page;
    int entry, half;
    uint32_t mask;  // the block's members

    __device__ __forceinline__ uint32_t members(int c) const { return Traits::members_of(mask, c); }
    __device__ __forceinline__ int first_token() const {
      return static_cast<int>(page.page()) * RowTile::kPageSize + half * Math::kBlockTokens;
    }
    __device__ __forceinline__ int first_slot() const { return static_cast<int>(page.slot()) * RowTile::kPageSize + half * Math::kBlockTokens; }
  };

  __device__ __forceinline__ Block get(int block) const {
    const int entry = block / kBlocksPerPage, half = block % kBlocksPerPage;
    const auto page = shared.list[entry];
    return {page, entry, half, half == 0 ? page.mask() : page.late()};
  }

  // Consumers without a member skip the block.
  __device__ __forceinline__ void free_for_others(uint64_t* barrier, const Block& block) const {
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c)
      if (block.members(c) == 0) ptx::mbarrier_arrive_many(barrier, RowTile::kWarps);
  }

  // Copies a block from a cache to shared memory: a box of its map.
  __device__ __forceinline__ void copy(uint8_t* to, const CUtensorMap& map, const Block& block, int kv_head, uint64_t* landed) const {
    ptx::mbarrier_arrive_expect_tx(landed, RowTile::kTileBytes);
    if constexpr (Math::kBf16) ptx::tma_load_4d(to, &map, 0, block.first_slot(), 0, kv_head, landed);
    else ptx::tma_load_3d(to, &map, 0, kv_head, block.first_slot(), landed);
  }
};

// Copies K of the listed blocks into the ring, and tells consumers which block is theirs next.
template <class Traits>
struct KeyCopier : BlockCopier<Traits> {
  using typename BlockCopier<Traits>::Block;
  using BlockCopier<Traits>::shared, BlockCopier<Traits>::ring, BlockCopier<Traits>::kBlocksPerPage;

  uint32_t issued[Traits::kConsumers] = {};  // blocks of each consumer whose K has been issued
  uint32_t loaded = 0;  // blocks whose K has been issued

  // Where consumer c goes from here: to the first half of the page `pages` further on in the list.
  __device__ __forceinline__ NextBlock describe(int c, int entry, int half, int pages) const {
    const auto page = shared.list[entry + pages];
    const int distance = pages * kBlocksPerPage - half;
    const uint32_t far = distance > Traits::kStages ? NextBlock::kFar : 0;
    return {loaded + distance | far, page.page() << NextBlock::kPageShift | Traits::members_of(page.mask(), c)};
  }

  __device__ __forceinline__ NextBlock next_of(int c, const Block& block) const {
    if constexpr (kBlocksPerPage > 1) {
      const uint32_t late = Traits::members_of(block.page.late(), c);
      if (block.half == 0 && late != 0) return {loaded + 1 | NextBlock::kSecondHalf, block.page.page() << NextBlock::kPageShift | late};
    }
    const int pages = shared.distance[block.entry][c];
    return pages == 0 ? NextBlock{0, 0} : describe(c, block.entry, block.half, pages);
  }

  __device__ __forceinline__ void copy(const CUtensorMap& map, int number, int kv_head) {
    const int s = ring.stage;
    const Block block = this->get(number);
    NextBlock following[Traits::kConsumers];
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) following[c] = next_of(c, block);
    ptx::mbarrier_wait(&shared.k_free[s], ring.phase ^ 1);  // a barrier that was never used counts as free
    // v_ready's parity tells a page only from the one before it in the same slot, which a consumer may have skipped: it has landed
    // before any consumer can hear of this one.
    ptx::mbarrier_wait(&shared.v_ready[s], ring.phase ^ 1);
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) shared.next[s][c] = following[c];
    BlockCopier<Traits>::copy(shared.k[s], map, block, kv_head, &shared.k_ready[s]);
#pragma unroll
    for (int c = 0; c < Traits::kConsumers; ++c) {
      if (block.members(c) != 0) ptx::mbarrier_arrive(&shared.issued[c][issued[c]++ % Traits::kIssued]);
    }
    this->free_for_others(&shared.k_free[s], block);
    ring.advance();
    ++loaded;
  }
};

// Copies V of the listed blocks into the ring.
template <class Traits>
struct ValueCopier : BlockCopier<Traits> {
  using typename BlockCopier<Traits>::Block;
  using BlockCopier<Traits>::shared, BlockCopier<Traits>::ring;

  // `landed`: the barrier that is told, the stage's v_ready if null. Returns where the block goes.
  __device__ __forceinline__ int copy(const CUtensorMap& map, const UnionAttentionParams& p, int number, int kv_head,
                                      uint64_t* landed = nullptr) {
    const int s = ring.stage;
    const Block block = this->get(number);
    ptx::mbarrier_wait(&shared.v_free[s], ring.phase ^ 1);
    // Not before its K, which waits for V of the block before in the same slot and knows it by parity.
    if constexpr (Traits::kLoadingWarps > 1) ptx::mbarrier_wait(&shared.k_ready[s], ring.phase);
    if (landed == nullptr) landed = &shared.v_ready[s];
    if constexpr (Traits::Math::kBf16) {
      BlockCopier<Traits>::copy(shared.v[s], map, block, kv_head, landed);
    } else {
      const int64_t tile = static_cast<int64_t>(kv_head) * p.pool_pages + block.page.slot();
      ptx::mbarrier_arrive_expect_tx(landed, RowTile::kTileBytes);
      ptx::bulk_load(shared.v[s], p.value_tiles + tile * RowTile::kTileBytes, RowTile::kTileBytes, landed);
    }
    this->free_for_others(&shared.v_free[s], block);
    ring.advance();
    return s;
  }
};

// Run by a warp: the last `rows` tokens of a block of V in BF16 become zeros.
__device__ __forceinline__ void clear_last_rows(uint8_t* v, int rows, int lane) {
  constexpr int kVectors = 128 / sizeof(uint4);  // of a row of a panel
#pragma unroll 1
  for (int i = lane; i < rows * kVectors; i += 32) {
#pragma unroll
    for (int panel = 0; panel < Bf16Math::kPanels; ++panel)
      reinterpret_cast<uint4*>(v + (panel + 1) * Bf16Math::kPanelBytes)[-1 - i] = make_uint4(0, 0, 0, 0);
  }
}

// One warp's work: draws groups, lists their pages and loads K, and V too unless it is load_values' work.
template <class Traits>
__device__ __forceinline__ void load_groups(const CUtensorMap& map, const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared,
                                            int work_items, int lane) {
  constexpr bool kLoadsValues = Traits::kLoadingWarps == 1;
  RingPosition<Traits::kDraws> draws;
  RingPosition<Traits::kGroupSlots> group_ring;
  RingPosition<1> list_ring;
  KeyCopier<Traits> keys{{shared}};
  ValueCopier<Traits> values{{shared}};
  int next_work = kNoWork;
  if (lane == 0) next_work = draw_group(p, shared, work_items, draws);
#pragma unroll 1
  while (true) {
    const int work = __shfl_sync(~0u, next_work, 0);
    if (work == kNoWork) break;
    GroupPages<Traits> pages;
    pages.fetch(p, work, 0, lane);
    const bool two_halves = Traits::kMaxUnion > pages.kEntries && pages.are_full();
    pages.drop_unseen();
    if constexpr (!kLoadsValues) {
      ptx::mbarrier_wait(&shared.list_read, list_ring.phase ^ 1);
      __syncwarp();  // a lane that still waits must not see the barrier move on twice
      list_ring.advance();
    }
    __syncwarp();  // the last group's list has been read
    int listed = list_seen_pages(pages, shared, 0, lane);
    if (two_halves) {
      pages.fetch(p, work, pages.kEntries, lane);
      pages.drop_unseen();
      listed = list_seen_pages(pages, shared, listed, lane);
    }
    int first[Traits::kConsumers];
    const int count = link_pages(shared, listed, lane, first);
    if constexpr (!kLoadsValues) {
      int hidden = 0;
      if (count > 0) {
        const auto last = keys.get(count - 1);
        hidden = last.first_token() + Traits::Math::kBlockTokens - 1 - pages.last_position();
      }
      if (lane == 0) shared.head = {work, count, hidden};
      ptx::mbarrier_arrive(&shared.listed);  // every lane: each has written a part of the list
    }
    ptx::mbarrier_wait(&shared.done[group_ring.stage], group_ring.phase ^ 1);
    __syncwarp();  // a lane that still waits must not see the barrier move on twice
    if (lane == 0) {
#pragma unroll
      for (int c = 0; c < Traits::kConsumers; ++c)
        shared.groups[group_ring.stage].first[c] = first[c] < 0 ? NextBlock{0, 0} : keys.describe(c, 0, 0, first[c]);
      ptx::mbarrier_arrive(&shared.ready[group_ring.stage]);
      const int kv_head = work / p.groups;
      const int draw_at = max(count - Traits::kDrawAhead, 0);
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        keys.copy(map, block, kv_head);
        // V of a block behind K of the next: a consumer needs it a block later, and frees it a block later.
        if (kLoadsValues && block > 0) values.copy(map, p, block - 1, kv_head);
        if (block == draw_at) next_work = draw_group(p, shared, work_items, draws);
      }
      if (kLoadsValues && count > 0) values.copy(map, p, count - 1, kv_head);
      if (count == 0) next_work = draw_group(p, shared, work_items, draws);
    }
    __syncwarp();
    group_ring.advance();
  }
  if constexpr (!kLoadsValues) {
    ptx::mbarrier_wait(&shared.list_read, list_ring.phase ^ 1);
    if (lane == 0) shared.head.work = kNoWork;
    ptx::mbarrier_arrive(&shared.listed);
  }
  if (lane == 0) {
    ptx::mbarrier_wait(&shared.done[group_ring.stage], group_ring.phase ^ 1);
    ptx::mbarrier_arrive(&shared.ready[group_ring.stage]);  // the end of the queue
    // The last CTA that has drawn its end leaves the queue as it found it, for the next launch.
    if (atomicAdd(p.queue + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p.queue[0] = 0;
      p.queue[1] = 0;
    }
  }
}

// The work of a warp that loads V alone, as it lies in a BF16 cache. There anything may lie behind a sequence's end, and a probability of zero
// does not undo a NaN: what nobody of the group sees, at the end of its last block, is cleared before consumers are told.
template <class Traits>
__device__ __forceinline__ void load_values(const CUtensorMap& map, const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared,
                                            int lane) {
  RingPosition<1> list_ring, last_ring;
  ValueCopier<Traits> copier{{shared}};
#pragma unroll 1
  while (true) {
    ptx::mbarrier_wait(&shared.listed, list_ring.phase);
    __syncwarp();  // a lane that still waits must not see the barrier move on twice
    list_ring.advance();
    const ListHead head = shared.head;
    if (head.work == kNoWork) break;
    const bool clears = head.hidden > 0;
    int last_stage = 0;
    if (lane == 0) {
      const int kv_head = head.work / p.groups;
#pragma unroll 1
      for (int block = 0; block < head.blocks; ++block)
        last_stage = copier.copy(map, p, block, kv_head, clears && block == head.blocks - 1 ? &shared.last_landed : nullptr);
    }
    __syncwarp();
    ptx::mbarrier_arrive(&shared.list_read);  // every lane: each has read the head
    if (clears) {
      ptx::mbarrier_wait(&shared.last_landed, last_ring.phase);
      last_ring.advance();
      last_stage = __shfl_sync(~0u, last_stage, 0);
      clear_last_rows(shared.v[last_stage], head.hidden, lane);
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&shared.v_ready[last_stage]);
    }
  }
  // Nobody may have waited for a block that nobody sees, and no copy may land when the CTA is gone. (The ring is lane 0's.)
  if (lane == 0) {
    for (int s = 0; s < Traits::kStages; ++s)
      ptx::mbarrier_wait(&shared.v_ready[s], s < copier.ring.stage ? copier.ring.phase : copier.ring.phase ^ 1);
  }
}

// ---------------------------------------------------------------- Quantising warps

template <class Traits>
__device__ __forceinline__ void quantise_groups(const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared, int number, int lane) {
  using Rows = typename Traits::Rows;
  const float softmax_scale_log2 = p.softmax_scale_log2 * (p.k_scale_device ? *p.k_scale_device : 1.0f);
  RingPosition<Traits::kGroupSlots> ring;
  RingPosition<Traits::kDraws> draws;
#pragma unroll 1
  while (true) {
    ptx::mbarrier_wait(&shared.drawn[draws.stage], draws.phase);
    __syncwarp();  // a lane that still waits must not see the barrier move on twice
    int work = 0;
    if (lane == 0) {
      work = shared.draws[draws.stage];
      ptx::mbarrier_arrive(&shared.read[draws.stage]);
    }
    work = __shfl_sync(~0u, work, 0);
    draws.advance();
    StreamGroup<Traits>& group = shared.groups[ring.stage];
    ptx::mbarrier_wait(&shared.done[ring.stage], ring.phase ^ 1);
    if (number == 0 && lane == 0) group.work = work;
    if (work != kNoWork) {
      const int kv_head = work / p.groups;
#pragma unroll
      for (int r = number; r < Traits::kGroupSize; r += Traits::kQuantisingWarps)
        prefetch_query(p, __ldg(p.queries + static_cast<int64_t>(work) * Traits::kGroupSize + r), kv_head, lane);
#pragma unroll 1
      for (int r = number; r < Traits::kGroupSize; r += Traits::kQuantisingWarps) {
        const int consumer = r / Rows::kQueries;
        const int64_t slot = static_cast<int64_t>(work) * Traits::kGroupSize + r;
        const int query = __ldg(p.queries + slot), limit = __ldg(p.limits + slot);
        if (lane == 0) {
          group.queries[r] = query;
          group.limits[r] = limit;
        }
        quantise_query<typename Traits::Math, Rows>(p, shared.q[ring.stage][consumer], group.row_scale[consumer], query, kv_head,
                                                    r % Rows::kQueries, lane, softmax_scale_log2);
      }
      ptx::fence_proxy_async_shared();
    }
    ptx::mbarrier_arrive(&shared.ready[ring.stage]);  // every lane: each has written a part
    if (work == kNoWork) break;
    ring.advance();
  }
}

// ---------------------------------------------------------------- Consumer

template <class Traits>
__device__ __forceinline__ void consume(const UnionAttentionParams& p, StreamSharedStorage<Traits>& shared, int number, int warp,
                                        int lane) {
  using Math = typename Traits::Math;
  using Rows = typename Traits::Rows;
  // What the loading warp has written is read by the lane that hands it back, and passed to the warp.
  auto read = [&](const NextBlock& entry) {
    NextBlock block{};
    if (lane == 0) block = entry;
    return block;
  };
  auto pass = [](const NextBlock& block) { return NextBlock{__shfl_sync(~0u, block.place, 0), __shfl_sync(~0u, block.meta, 0)}; };
  auto release = [&](uint64_t* barrier) {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(barrier);
  };
  // Waits until K of the consumer's next block has landed; returns where.
  uint32_t own = 0;  // own blocks waited for
  auto wait_for = [&](const NextBlock& block) {
    ptx::mbarrier_wait(&shared.issued[number][own % Traits::kIssued], own / Traits::kIssued & 1);
    ++own;
    const RingPosition<Traits::kStages> at{static_cast<int>(block.number() % Traits::kStages), block.number() / Traits::kStages & 1};
    ptx::mbarrier_wait(&shared.k_ready[at.stage], at.phase);
    return at;
  };
  RingPosition<Traits::kGroupSlots> group_ring;
#pragma unroll 1
  while (true) {
    // -------- The next group
    const int g = group_ring.stage;
    ptx::mbarrier_wait(&shared.ready[g], group_ring.phase);
    const StreamGroup<Traits>& group = shared.groups[g];
    const int work = group.work;
    if (work == kNoWork) break;
    const int slot = number * Rows::kQueries + Rows::query_of(warp, 0);
    const int limit[2] = {group.limits[slot], group.limits[slot + Rows::kPairs]};
    const float* row_scale = group.row_scale[number] + 16 * warp + (lane >> 2);
    const float scale[2] = {row_scale[0], row_scale[8]};
    const uint64_t q_descriptor = ptx::wgmma_descriptor(shared.q[g][number]);
    NextBlock block = pass(read(group.first[number]));
    RowState state[2];
    float o[ptx::kAccumulators];
#pragma unroll
    for (int i = 0; i < ptx::kAccumulators; ++i) o[i] = 0.0f;

    // -------- Its blocks
    while (block.members() != 0) {
      float s[Math::kLogits];
      uint32_t fragments[Math::kTerms][kBlockSteps][4];  // P
      RingPosition<Traits::kStages> at = wait_for(block);
      NextBlock next = read(shared.next[at.stage][number]);
      if constexpr (Math::kTerms > 1) {
        // Softmax of `block` from S in halves, as they come; frees its K.
        auto softmax_of_halves = [&] {
          BlockSoftmax<Math, Rows> softmax(block.members(), block.first_token<Math>(), limit, warp);
          ptx::wgmma_wait<1>();
          ptx::pin_some_registers<0, kHalf>(s);
          softmax.template begin<0, Math::kRowLogits / 2>(s, state, scale, lane);
          ptx::wgmma_wait<0>();
          ptx::pin_some_registers<kHalf, kHalf>(s);
          release(&shared.k_free[at.stage]);
          softmax.template begin<Math::kRowLogits / 2, Math::kRowLogits>(s, state, scale, lane);
          softmax.finish(s, state, scale, o, fragments, lane);
        };
        auto issue_values_in_halves = [&] {
          ptx::mbarrier_wait(&shared.v_ready[at.stage], at.phase);
          ptx::pin_registers(fragments);
          ptx::pin_registers(s);
          ptx::wgmma_fence();
          issue_half_of_values<0>(s, fragments, ptx::wgmma_descriptor(shared.v[at.stage]));
          ptx::wgmma_commit();
          issue_half_of_values<kHalf>(s, fragments, ptx::wgmma_descriptor(shared.v[at.stage]));
          ptx::wgmma_commit();
        };
        ptx::pin_registers(s);
        ptx::wgmma_fence();
        issue_half_of_logits<Math::kTerms, 0>(s, q_descriptor, ptx::wgmma_descriptor(shared.k[at.stage]));
        ptx::wgmma_commit();
        issue_half_of_logits<Math::kTerms, kHalf>(s, q_descriptor, ptx::wgmma_descriptor(shared.k[at.stage]));
        ptx::wgmma_commit();
        next = pass(next);
        softmax_of_halves();
#pragma unroll 1
        while (next.members() != 0 && !next.is_far()) {
          issue_values_in_halves();
          const RingPosition<Traits::kStages> next_at = wait_for(next);
          NextBlock after = read(shared.next[next_at.stage][number]);
          ptx::wgmma_wait<1>();
          ptx::pin_some_registers<0, kHalf>(s);
          add_half<0>(s, o);
          ptx::pin_some_registers<0, kHalf>(s);
          ptx::wgmma_fence();
          issue_half_of_logits<Math::kTerms, 0>(s, q_descriptor, ptx::wgmma_descriptor(shared.k[next_at.stage]));
          ptx::wgmma_commit();
          ptx::wgmma_wait<1>();
          ptx::pin_some_registers<kHalf, kHalf>(s);
          release(&shared.v_free[at.stage]);
          add_half<kHalf>(s, o);
          ptx::pin_some_registers<kHalf, kHalf>(s);
          ptx::wgmma_fence();
          issue_half_of_logits<Math::kTerms, kHalf>(s, q_descriptor, ptx::wgmma_descriptor(shared.k[next_at.stage]));
          ptx::wgmma_commit();
          at = next_at;
          block = next;
          next = pass(after);
          softmax_of_halves();
        }
        issue_values_in_halves();
        ptx::wgmma_wait<1>();
        ptx::pin_some_registers<0, kHalf>(s);
        add_half<0>(s, o);
        ptx::wgmma_wait<0>();
        ptx::pin_some_registers<kHalf, kHalf>(s);
        release(&shared.v_free[at.stage]);
        add_half<kHalf>(s, o);
      } else {
        ptx::pin_registers(s);
        ptx::pin_registers(o);
        ptx::wgmma_fence();
        issue_logits(s, q_descriptor, ptx::wgmma_descriptor(shared.k[at.stage]));
        ptx::wgmma_commit();
        next = pass(next);
        ptx::wgmma_wait<0>();
        ptx::pin_registers(s);
        release(&shared.k_free[at.stage]);
        {
          BlockSoftmax<Math, Rows> softmax(block.members(), block.first_token<Math>(), limit, warp);
          softmax.begin(s, state, scale, lane);
          softmax.finish(s, state, scale, o, fragments, lane);
        }
#pragma unroll 1
        while (next.members() != 0 && !next.is_far()) {
          const RingPosition<Traits::kStages> next_at = wait_for(next);
          NextBlock after = read(shared.next[next_at.stage][number]);
          ptx::mbarrier_wait(&shared.v_ready[at.stage], at.phase);
          ptx::pin_registers(fragments);
          ptx::pin_registers(s);
          ptx::pin_registers(o);
          ptx::wgmma_fence();
          issue_logits(s, q_descriptor, ptx::wgmma_descriptor(shared.k[next_at.stage]));
          ptx::wgmma_commit();
          issue_values<Math>(o, fragments, shared.v[at.stage]);
          ptx::wgmma_commit();
          block = next;
          next = pass(after);
          BlockSoftmax<Math, Rows> softmax(block.members(), block.first_token<Math>(), limit, warp);
          ptx::wgmma_wait<1>();
          ptx::pin_registers(s);
          softmax.begin(s, state, scale, lane);
          ptx::wgmma_wait<0>();
          ptx::pin_registers(o);
          release(&shared.v_free[at.stage]);
          at = next_at;
          release(&shared.k_free[at.stage]);
          softmax.finish(s, state, scale, o, fragments, lane);
        }
        ptx::mbarrier_wait(&shared.v_ready[at.stage], at.phase);
        ptx::pin_registers(fragments);
        ptx::pin_registers(o);
        ptx::wgmma_fence();
        issue_values<Math>(o, fragments, shared.v[at.stage]);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(o);
        release(&shared.v_free[at.stage]);
      }
      block = next;
    }
    const int query[2] = {group.queries[slot], group.queries[slot + Rows::kPairs]};
    ptx::mbarrier_arrive(&shared.done[g]);  // every lane: each has read what lies in the group's slot
    group_ring.advance();
    write_rows<Math, Rows>(p, o, state, query, work / p.groups, warp, lane);
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
    constexpr int kConsumerWarps = RowTile::kWarps * Traits::kConsumers;
    ptx::prefetch_tensor_map(&k_map);
    if constexpr (Traits::Math::kBf16) ptx::prefetch_tensor_map(&v_map);
    constexpr int kListArrivals = Traits::kLoadingWarps > 1 ? 32 : 1;  // every lane's; with one loading warp nobody uses the two
    ptx::mbarrier_init(&shared.listed, kListArrivals);
    ptx::mbarrier_init(&shared.list_read, kListArrivals);
    ptx::mbarrier_init(&shared.last_landed, 1);
    for (int s = 0; s < Traits::kStages; ++s) {
      ptx::mbarrier_init(&shared.k_ready[s], 1);
      ptx::mbarrier_init(&shared.v_ready[s], 1);
      ptx::mbarrier_init(&shared.k_free[s], kConsumerWarps);
      ptx::mbarrier_init(&shared.v_free[s], kConsumerWarps);
    }
    for (int c = 0; c < Traits::kConsumers; ++c)
      for (int i = 0; i < Traits::kIssued; ++i) ptx::mbarrier_init(&shared.issued[c][i], 1);
    for (int g = 0; g < Traits::kGroupSlots; ++g) {
      ptx::mbarrier_init(&shared.ready[g], 32 * Traits::kQuantisingWarps + 1);
      ptx::mbarrier_init(&shared.done[g], 32 * kConsumerWarps);
    }
    for (int d = 0; d < Traits::kDraws; ++d) {
      ptx::mbarrier_init(&shared.drawn[d], 1);
      ptx::mbarrier_init(&shared.read[d], Traits::kQuantisingWarps);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::wait_for_earlier_kernels();

  if (warpgroup == 0) {
    ptx::set_max_registers_down<Traits::kProducerRegisters>();
    if (warp == 0) {
      load_groups<Traits>(k_map, p, shared, work_items, lane);
      return;
    }
    if constexpr (Traits::kLoadingWarps > 1) {
      if (warp == 1) {
        load_values<Traits>(v_map, p, shared, lane);
        return;
      }
    }
    quantise_groups<Traits>(p, shared, warp - Traits::kLoadingWarps, lane);
  } else {
    ptx::set_max_registers_up<Traits::kConsumerRegisters>();
    consume<Traits>(p, shared, warpgroup - 1, warp, lane);
  }
}

// ---------------------------------------------------------------- Host

// `v_map` is read in BF16 only; otherwise V comes from the value tiles.
template <class Traits>
cudaError_t launch_stream_attention(const CUtensorMap& k_map, const CUtensorMap& v_map, const UnionAttentionParams& params, int kv_heads,
                                    int processors, cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(StreamSharedStorage<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a CTA");
  auto* kernel = stream_attention_kernel<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int work_items = params.groups * kv_heads;
  return ptx::launch_early(kernel, dim3(min(processors, work_items)), dim3(Traits::kThreads), kSharedBytes, stream, k_map, v_map, params,
                           work_items);
}

}  // namespace pw
