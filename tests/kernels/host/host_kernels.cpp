// The regroup and union-preparation kernels as a plain shared library on the CPU; called by
// tests/kernels/host_kernels.py.
#include "regroup.cuh"
#include "union_prep.cuh"

// host_kernels.py spells both structs out for ctypes.
static_assert(sizeof(pw::PlanPtrs) == 8 * sizeof(void*), "_PlanPtrs in host_kernels.py");
static_assert(sizeof(pw::Lengths) == 3 * sizeof(void*) + 2 * sizeof(int), "_Lengths in host_kernels.py");

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void host_set_seed(uint64_t seed) { shim::seed = seed; }

EXPORT void host_find_races(int on) { shim::find_races = on != 0; }

EXPORT const char* host_message() { return shim::message.c_str(); }

EXPORT int host_divide(int n, int divisor) { return pw::Divisor(divisor).divide(n); }

EXPORT int host_regroup(const int32_t* topk, int64_t head_stride, int64_t row_stride, int kv_heads, int k,
                        const pw::Lengths* lengths, int window, int group_size, int page_size, int capacity, int guard,
                        int32_t* perm, unsigned long long* visits) {
  shim::message.clear();
  return pw::launch_regroup(topk, head_stride, row_stride, kv_heads, k, *lengths, window, group_size, page_size,
                            capacity, guard != 0, perm, visits, nullptr);
}

EXPORT int host_union_prep(const int32_t* topk, int64_t head_stride, int64_t row_stride, int kv_heads, int k,
                           const int32_t* perm, const pw::Lengths* lengths, const int32_t* req_to_token,
                           int64_t req_stride, int req_rows, int req_positions, const void* slot_ids,
                           int slot_ids_are_int64, int num_pool_pages,
                           int window, int group_size, int page_size, const pw::PlanPtrs* plan, int groups,
                           int max_union) {
  shim::message.clear();
  return pw::launch_union_prep(topk, head_stride, row_stride, kv_heads, k, perm, *lengths, req_to_token, req_stride,
                               req_rows, req_positions, slot_ids, slot_ids_are_int64 != 0, num_pool_pages, window, group_size, page_size, *plan,
                               groups, max_union, perm != nullptr, nullptr);
}
