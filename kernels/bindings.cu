// The library's exported functions (TVM FFI): argument checks that the Python side cannot leave out, then one launch each.
// Shapes and dtypes are checked in pageweaver_sglang; what is asserted here guards against a mismatch of the two.
//
// With PW_PLAN_ONLY the library ends where the plan is complete: what comes before attention runs on any GPU from compute
// capability 8.0 on, what comes after it is Hopper's. pageweaver_sglang/cuda/portable.py attends there.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include "common.cuh"
#include "regroup.cuh"
#include "union_prep.cuh"
#ifndef PW_PLAN_ONLY
#include "stream.cuh"
#include "union8.cuh"
#include "value_tiles.cuh"
#endif

namespace {

namespace ffi = tvm::ffi;
using ffi::Optional;
using ffi::TensorView;

cudaStream_t current_stream(const TensorView& tensor) {
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(tensor.device().device_type, tensor.device().device_id));
}

void check_cuda(cudaError_t error, const char* function) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << function << ": " << cudaGetErrorString(error);
}

// Launches go to the device of the tensors, whatever device the calling thread has current.
class DeviceGuard {
 public:
  explicit DeviceGuard(const TensorView& tensor) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    device_ = tensor.device().device_id;
    if (device_ != previous_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (device_ != previous_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0, device_ = 0;
};

template <class T>
T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
const T* data_or_null(const Optional<TensorView>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor.value().data_ptr()) : nullptr;
}

void require(bool condition, const char* function, const char* what) {
  if (!condition) TVM_FFI_THROW(ValueError) << function << ": " << what;
}

pw::Lengths lengths_of(const TensorView& cu_seqlens, const TensorView& prefix_lens, const Optional<TensorView>& seq_lens, int64_t tokens) {
  pw::Lengths lengths;
  lengths.cu_seqlens = data<const int32_t>(cu_seqlens);
  lengths.prefix_lens = data<const int32_t>(prefix_lens);
  lengths.seq_lens = data_or_null<int32_t>(seq_lens);
  lengths.requests = static_cast<int>(prefix_lens.size(0));
  lengths.tokens = static_cast<int>(tokens);
  return lengths;
}

// topk_idx int32 [kv_heads, tokens, k] -> perm int32 [kv_heads, tokens]; adds to visits int64 [2], if given.
void regroup(TensorView topk_idx, TensorView cu_seqlens, TensorView prefix_lens, TensorView perm, int64_t window, int64_t group_size,
             int64_t page_size, int64_t capacity, bool guard_window, Optional<TensorView> visits) {
  require(topk_idx.stride(2) == 1 && perm.IsContiguous(), "regroup", "topk_idx rows and perm must be contiguous");
  require(!visits.has_value() || (visits.value().IsContiguous() && visits.value().numel() == 2 && visits.value().dtype().bits == 64),
          "regroup", "visits must be int64 [2]");
  DeviceGuard guard(topk_idx);
  check_cuda(pw::launch_regroup(data<const int32_t>(topk_idx), topk_idx.stride(0), topk_idx.stride(1), topk_idx.size(0), topk_idx.size(2),
                                lengths_of(cu_seqlens, prefix_lens, Optional<TensorView>(), topk_idx.size(1)), window, group_size,
                                page_size, capacity, guard_window, data<int32_t>(perm),
                                const_cast<unsigned long long*>(data_or_null<unsigned long long>(visits)), current_stream(topk_idx)),
             "regroup");
}

// Fills the plan's arrays (pageweaver_sglang/plan.py); `slots` only when req_to_token is given.
void union_prep(TensorView topk_idx, Optional<TensorView> perm, TensorView cu_seqlens, TensorView seq_lens, TensorView prefix_lens,
                Optional<TensorView> req_to_token, Optional<TensorView> slot_ids, int64_t num_pool_pages, int64_t window,
                int64_t page_size, TensorView pages, TensorView masks, TensorView counts, TensorView queries, TensorView limits,
                Optional<TensorView> slots, Optional<TensorView> queue, Optional<TensorView> marks, bool behind_regroup) {
  require(topk_idx.stride(2) == 1, "union_prep", "topk_idx rows must be contiguous");
  require(req_to_token.has_value() == slots.has_value() && req_to_token.has_value() == slot_ids.has_value(), "union_prep",
          "req_to_token, slot_ids and slots go together");
  require(!marks.has_value() || (slots.has_value() && marks.value().size(0) == topk_idx.size(0) &&
                                 marks.value().size(1) == num_pool_pages && marks.value().IsContiguous()),
          "union_prep", "marks must be [kv_heads, num_pool_pages] and need slots");
  require(masks.dtype().bits == (queries.size(2) <= 8 ? 8 : 32), "union_prep", "masks must be uint8, int32 for groups of more than 8");
  DeviceGuard guard(topk_idx);
  pw::PlanPtrs plan;
  plan.pages = data<int32_t>(pages);
  plan.masks = masks.data_ptr();
  plan.counts = data<int32_t>(counts);
  plan.queries = data<int32_t>(queries);
  plan.limits = data<int32_t>(limits);
  plan.slots = const_cast<int32_t*>(data_or_null<int32_t>(slots));
  plan.queue = const_cast<int32_t*>(data_or_null<int32_t>(queue));
  plan.marks = const_cast<int32_t*>(data_or_null<int32_t>(marks));
  const bool wide_slot_ids = slot_ids.has_value() && slot_ids.value().dtype().bits == 64;
  check_cuda(pw::launch_union_prep(data<const int32_t>(topk_idx), topk_idx.stride(0), topk_idx.stride(1), topk_idx.size(0),
                                   topk_idx.size(2), data_or_null<int32_t>(perm),
                                   lengths_of(cu_seqlens, prefix_lens, seq_lens, topk_idx.size(1)), data_or_null<int32_t>(req_to_token),
                                   req_to_token.has_value() ? req_to_token.value().stride(0) : 0,
                                   req_to_token.has_value() ? static_cast<int>(req_to_token.value().size(0)) : 0,
                                   req_to_token.has_value() ? static_cast<int>(req_to_token.value().size(1)) : 0,
                                   data_or_null<void>(slot_ids),
                                   wide_slot_ids, num_pool_pages, window, queries.size(2), page_size, plan, pages.size(1), pages.size(2), behind_regroup,
                                   current_stream(topk_idx)),
             "union_prep");
}

#ifndef PW_PLAN_ONLY
constexpr double kLog2E = 1.4426950408889634;

int multiprocessors(const char* function) {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), function);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), function);
  return count;
}

// Transposes every marked page of V to its tile, and clears the marks; writes the order in which the plan's groups are drawn behind the
// queue's two counters. marks int32 [kv_heads, pool pages], tiles uint8 [kv_heads, pool pages, 128 * 128].
void value_tiles(TensorView v_cache, TensorView marks, TensorView tiles, TensorView counts, TensorView queue) {
  const char* name = "value_tiles";
  require(v_cache.size(2) == 128 && v_cache.stride(2) == 1 && v_cache.stride(0) % 16 == 0 && v_cache.stride(1) % 16 == 0, name,
          "v_cache must be [slots, kv_heads, 128] with rows of 16-byte vectors");
  require(marks.IsContiguous() && tiles.IsContiguous() && marks.size(0) == v_cache.size(1) &&
              marks.size(1) == v_cache.size(0) / pw::RowTile::kPageSize && tiles.size(0) == marks.size(0) && tiles.size(1) == marks.size(1) &&
              tiles.size(2) == pw::RowTile::kTileBytes,
          name, "marks must be [kv_heads, pool pages], tiles [kv_heads, pool pages, 16384]");
  DeviceGuard guard(v_cache);
  pw::ValueTileParams params;
  params.v = data<const uint8_t>(v_cache);
  params.slot_stride = v_cache.stride(0);
  params.head_stride = v_cache.stride(1);
  params.marks = data<int32_t>(marks);
  params.tiles = data<uint8_t>(tiles);
  params.pool_pages = static_cast<int>(marks.size(1));
  require(counts.IsContiguous() && counts.size(0) == v_cache.size(1) && queue.IsContiguous() && queue.size(0) == 2 + counts.numel(), name,
          "counts must be [kv_heads, groups], queue [2 + kv_heads * groups]");
  params.counts = data<const int32_t>(counts);
  params.order = data<int32_t>(queue) + 2;
  params.groups = static_cast<int>(counts.size(1));
  check_cuda(pw::launch_value_tiles(params, static_cast<int>(v_cache.size(1)), multiprocessors(name), current_stream(v_cache)), name);
}

bool is_bf16(const TensorView& tensor) { return tensor.dtype().code == kDLBfloat && tensor.dtype().bits == 16; }

// A cache's tensor map with boxes of `tokens` rows, or an error that names the cache.
CUtensorMap cache_map(const char* function, const char* name, const TensorView& cache, int tokens) {
  CUtensorMap map;
  const CUresult result = pw::encode_cache_map(&map, cache.data_ptr(), is_bf16(cache), cache.size(0), static_cast<int>(cache.size(1)),
                                               cache.stride(0), cache.stride(1), tokens);
  if (result != CUDA_SUCCESS)
    TVM_FFI_THROW(RuntimeError) << function << ": cuTensorMapEncodeTiled failed (" << result << ") for " << name << " of " << cache.size(0)
                                << " slots, strides " << cache.stride(0) << ", " << cache.stride(1);
  return map;
}

// out[i] = attention of query i over its own pages. `engine` is "stream" (groups of 8, or of 16 with at most 8 heads per KV head; needs `queue`,
// and of E4M3 caches the plan's pages in `tiles`, v_cache is not read then) or "union8" (E4M3; groups of 8: the two-CTA kernel, groups of 4: the
// same without a cluster).
// `precision` is "fp8" or, with the stream engine, "high": two E4M3 terms for a value of Q and of P. BF16 caches are multiplied in BF16 in either.
void attention(ffi::String engine, ffi::String precision, TensorView q, TensorView k_cache, TensorView v_cache, TensorView slots, TensorView pages,
               TensorView masks, TensorView counts, TensorView queries, TensorView limits, Optional<TensorView> queue, Optional<TensorView> tiles,
               TensorView out, double sm_scale, double k_scale, double v_scale, Optional<TensorView> k_scale_device, Optional<TensorView> v_scale_device) {
  const char* name = "attention";
  const int kv_heads = static_cast<int>(k_cache.size(1));
  const int64_t group_size = queries.size(2);
  const bool stream_engine = engine == "stream";
  require(stream_engine || engine == "union8", name, "engine must be stream or union8");
  const bool high_precision = precision == "high";
  require(high_precision || precision == "fp8", name, "precision must be fp8 or high");
  require(!high_precision || stream_engine, name, "precision high needs the stream engine");
  require(group_size == 8 || group_size == (stream_engine ? 16 : 4), name, "group_size must be 8 or 16, 8 or 4 with the union8 engine");
  require(masks.dtype().bits == (group_size <= 8 ? 8 : 32), name, "masks must be uint8, int32 for groups of more than 8");
  const bool bf16 = is_bf16(k_cache);
  require(bf16 == is_bf16(v_cache), name, "k_cache and v_cache must have one dtype");
  require(!bf16 || stream_engine, name, "BF16 caches need the stream engine");
  require(!stream_engine || queue.has_value(), name, "the stream engine needs a queue");
  require(!stream_engine || bf16 != tiles.has_value(), name, "the stream engine needs tiles of an E4M3 cache, and none of a BF16 cache");
  require(!tiles.has_value() || (tiles.value().IsContiguous() && tiles.value().size(0) == kv_heads &&
                                 tiles.value().size(1) == k_cache.size(0) / pw::RowTile::kPageSize),
          name, "tiles must be [kv_heads, pool pages, 16384]");
  require(!queue.has_value() || queue.value().size(0) == 2 + counts.numel(), name, "queue must be [2 + kv_heads * groups]");
  const int most_heads = group_size > 8 ? pw::TileRows<8>::kHeads : pw::TileRows<4>::kHeads;
  require(kv_heads > 0 && q.size(1) % kv_heads == 0 && q.size(1) >= kv_heads && q.size(1) <= most_heads * kv_heads, name,
          "q must have 1 to 16 heads per KV head, to 8 in groups of 16");
  require(q.size(2) == 128 && k_cache.size(2) == 128, name, "head dim 128 is built in");
  require(q.stride(2) == 1 && out.stride(2) == 1 && k_cache.stride(2) == 1 && v_cache.stride(2) == 1, name,
          "the last dimension of q, out, k_cache and v_cache must be contiguous");
  DeviceGuard guard(q);
  pw::UnionAttentionParams params;
  params.q = data<const __nv_bfloat16>(q);
  params.q_token_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.out = data<__nv_bfloat16>(out);
  params.out_token_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.slots = data<const int32_t>(slots);
  params.pages = data<const int32_t>(pages);
  params.masks = masks.data_ptr();
  params.counts = data<const int32_t>(counts);
  params.queries = data<const int32_t>(queries);
  params.limits = data<const int32_t>(limits);
  params.heads = static_cast<int>(q.size(1)) / kv_heads;
  params.groups = static_cast<int>(queries.size(1));
  params.max_union = static_cast<int>(pages.size(2));
  params.softmax_scale_log2 = static_cast<float>(sm_scale * k_scale * kLog2E);
  params.v_scale = static_cast<float>(v_scale);
  params.k_scale_device = data_or_null<float>(k_scale_device);
  params.v_scale_device = data_or_null<float>(v_scale_device);
  params.queue = const_cast<int32_t*>(data_or_null<int32_t>(queue));
  params.order = tiles.has_value() ? params.queue + 2 : nullptr;  // value_tiles has written it
  params.value_tiles = data_or_null<uint8_t>(tiles);
  params.pool_pages = static_cast<int>(k_cache.size(0) / pw::RowTile::kPageSize);

  const cudaStream_t stream = current_stream(q);
  if (stream_engine) {
    auto launch_rows = [&](auto math, auto rows) {
      using Math = decltype(math);
      using Rows = decltype(rows);
      const CUtensorMap k_map = cache_map(name, "k_cache", k_cache, Math::kBlockTokens);
      const CUtensorMap v_map = Math::kBf16 ? cache_map(name, "v_cache", v_cache, Math::kBlockTokens) : k_map;
      check_cuda(pw::launch_stream_attention<pw::StreamTraits<2, Math, Rows>>(k_map, v_map, params, kv_heads, multiprocessors(name), stream), name);
    };
    auto launch = [&](auto math) {
      if (group_size == 8) launch_rows(math, pw::TileRows<4>{});
      else launch_rows(math, pw::TileRows<8>{});
    };
    if (bf16) launch(pw::Bf16Math{});
    else if (high_precision) launch(pw::E4m3Math<2>{});
    else launch(pw::E4m3Math<1>{});
    return;
  }
  auto launch = [&](auto traits) {
    using Traits = decltype(traits);
    check_cuda(pw::launch_union_attention<Traits>(cache_map(name, "k_cache", k_cache, Traits::kTokensPerCopy),
                                                  cache_map(name, "v_cache", v_cache, Traits::kTokensPerCopy), params, kv_heads, stream),
               name);
  };
  if (group_size == 8) launch(pw::UnionTraits<2>{});
  else launch(pw::UnionTraits<1>{});
}
#endif  // PW_PLAN_ONLY

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pw_regroup, regroup)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pw_union_prep, union_prep)
#ifndef PW_PLAN_ONLY
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pw_value_tiles, value_tiles)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(pw_attention, attention)
#endif
