// Runs CUDA C++ kernels without inline PTX on the CPU, for tests.
//
// The threads of a CTA are fibers of one OS thread. A fiber runs until it waits at a CTA barrier or a warp collective;
// a thread block of 128 threads costs some nanoseconds per thread and barrier. CTAs run one after another.
//
// What it checks besides the result:
//   * shared memory starts as garbage, is allocated to its exact size (AddressSanitizer sees overruns);
//   * a barrier or collective that not all threads reach, lanes of a warp in different collectives and partial masks
//     are errors: launch stops, cudaGetLastError() fails and shim::message says why;
//   * with shim::seed != 0 the next fiber is drawn at random, atomics and __ldg are further switch points, and CTAs run
//     in random order: code that lacks a barrier then gives wrong or changing results;
//   * with shim::find_races it is an error when two threads write the same byte of shared memory with no barrier
//     between them and not both by an atomic. A store counts when it changes the byte.
//
// Not modelled: several CTAs at a time, partial warps, clusters, asynchronous copies, inline PTX.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(SHIM_UCONTEXT)
#define SHIM_USES_UCONTEXT 1
#include <ucontext.h>
#else
#define SHIM_USES_UCONTEXT 0
#endif

#define __global__ inline
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define PW_SHARED(Type, name) Type& name = shim::shared_memory<Type>()
#define PW_LAUNCH(kernel, grid, block, stream, ...)          \
  do {                                                       \
    (void)(stream);                                          \
    shim::launch(grid, block, [&] { kernel(__VA_ARGS__); }); \
  } while (0)
#define PW_LAUNCH_EARLY(kernel, grid, block, stream, ...)     \
  [&] {                                                       \
    PW_LAUNCH(kernel, grid, block, stream, __VA_ARGS__);      \
    return cudaSuccess;                                       \
  }()

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
using std::max;
using std::min;

namespace shim {

constexpr int kWarp = 32;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 256 * 1024;
#else
constexpr size_t kStackBytes = 64 * 1024;
#endif

// ---------------------------------------------------------------- Context switch
#if SHIM_USES_UCONTEXT
using Context = ucontext_t;
inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }
inline void make_context(Context& context, char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#else
// Saves the callee-saved registers on the running stack, its pointer in *from, and goes on with the stack `to`.
extern "C" void shim_switch_stack(void** from, void* to);
asm(R"(
.text
.weak shim_switch_stack
.type shim_switch_stack, @function
shim_switch_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch_stack, .-shim_switch_stack
)");
using Context = void*;
inline void switch_context(Context& from, Context& to) { shim_switch_stack(&from, to); }
inline void make_context(Context& context, char* stack, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15};
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;  // entry never returns; keeps its stack aligned as after a call
  *--sp = reinterpret_cast<void*>(entry);
  for (int saved = 0; saved < 6; ++saved) *--sp = nullptr;
  context = sp;
}
#endif

// ---------------------------------------------------------------- Scheduler
struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  void* fake_stack = nullptr;  // AddressSanitizer's
  bool finished = false;
};

// Threads that wait for each other: a CTA (barrier) or a warp (collective).
struct Meeting {
  std::vector<int> waiting;
  const char* operation = nullptr;
  uint64_t values[2][kWarp];  // of this and of the previous collective: read until the next one is complete
  unsigned generation = 0;
  unsigned syncs = 0;  // __syncwarp only: other collectives order no memory accesses
};

// The last write to a byte of shared memory.
struct Write {
  int thread = -1;
  unsigned barrier, warp_sync;
  bool atomic;
};

inline uint64_t seed = 0;    // 0: threads and CTAs in order; otherwise at random
inline bool find_races = false;
inline std::string message;  // why the last launch failed
inline cudaError_t last_error = cudaSuccess;

inline std::vector<Fiber> fibers;  // kept between launches for their stacks
inline std::vector<int> ready;
inline size_t ready_head;
inline Meeting block_meeting;
inline std::vector<Meeting> warp_meetings;
inline int current, threads, running;
inline Context scheduler;
inline const std::function<void()>* body;
inline std::mt19937_64 random_order;
inline std::unique_ptr<char, void (*)(void*)> shared_block{nullptr, std::free};
inline std::vector<char> shared_image;  // find_races: shared memory after the last write that was looked at
inline std::vector<Write> writes;       // per byte of it
#if defined(__SANITIZE_ADDRESS__)
inline const void* main_stack;
inline size_t main_stack_bytes;
inline void* main_fake_stack;
#endif

inline void fail(const std::string& what) {
  if (last_error == cudaSuccess) {
    last_error = cudaErrorLaunchFailure;
    message = what + " (block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + " thread " +
              std::to_string(current) + ")";
  }
}

inline void note_write(size_t byte, bool atomic) {
  const unsigned barrier = block_meeting.generation, warp_sync = warp_meetings[current / kWarp].syncs;
  Write& last = writes[byte];
  const bool same_warp = last.thread / kWarp == current / kWarp;
  const bool ordered = last.barrier != barrier || (same_warp && last.warp_sync != warp_sync);
  if (last.thread >= 0 && last.thread != current && !ordered && !(last.atomic && atomic))
    fail("race: byte " + std::to_string(byte) + " of shared memory was last written by thread " +
         std::to_string(last.thread));
  last = {current, barrier, warp_sync, atomic};
}

// Finds what the running thread has stored since the last call.
inline void note_stores() {
  if (!find_races || shared_block == nullptr) return;
  const char* const now = shared_block.get();
  for (size_t line = 0; line < writes.size(); line += 64) {
    const size_t end = std::min(line + 64, writes.size());
    if (std::memcmp(now + line, &shared_image[line], end - line) == 0) continue;
    for (size_t byte = line; byte < end; ++byte)
      if (now[byte] != shared_image[byte]) note_write(byte, false);
    std::memcpy(&shared_image[line], now + line, end - line);
  }
}

// The store of an atomic operation.
template <class T>
void store_atomically(T* address, T value) {
  note_stores();
  *address = value;
  if (!find_races || shared_block == nullptr) return;
  const size_t first = reinterpret_cast<char*>(address) - shared_block.get();
  if (first >= writes.size()) return;  // global memory
  for (size_t byte = first; byte < first + sizeof(T); ++byte) note_write(byte, true);
  std::memcpy(&shared_image[first], address, sizeof(T));
}

inline void leave_fiber() {
  Fiber& fiber = fibers[current];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fiber.finished ? nullptr : &fiber.fake_stack, main_stack, main_stack_bytes);
#endif
  switch_context(fiber.context, scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &main_stack, &main_stack_bytes);
#endif
}

inline void run_fiber(int index) {
  current = index;
  threadIdx = dim3(index % blockDim.x, index / blockDim.x);
  Fiber& fiber = fibers[index];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&main_fake_stack, fiber.stack.get(), kStackBytes);
#endif
  switch_context(scheduler, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(main_fake_stack, nullptr, nullptr);
#endif
  note_stores();
}

inline void fiber_entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes);
#endif
  (*body)();
  fibers[current].finished = true;
  --running;
  leave_fiber();
  std::abort();  // a finished fiber is not resumed
}

inline int next_fiber() {
  if (seed != 0) {
    const size_t pick = ready_head + random_order() % (ready.size() - ready_head);
    std::swap(ready[ready_head], ready[pick]);
  }
  const int index = ready[ready_head++];
  if (ready_head == ready.size()) {
    ready.clear();
    ready_head = 0;
  }
  return index;
}

// With random order any thread may be overtaken here.
inline void switch_point() {
  if (seed == 0) return;
  ready.push_back(current);
  leave_fiber();
}

inline void meet(Meeting& meeting, size_t members, const char* operation) {
  note_stores();
  if (meeting.waiting.empty()) {
    meeting.operation = operation;
  } else if (std::strcmp(meeting.operation, operation) != 0) {
    fail(std::string("threads of one warp are in ") + meeting.operation + " and " + operation);
  }
  meeting.waiting.push_back(current);
  if (meeting.waiting.size() == members) {
    ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    ++meeting.generation;
    if (std::strcmp(operation, "__syncwarp") == 0) ++meeting.syncs;
  }
  leave_fiber();
}

// Every lane gives a value; returns the 32 values of the warp.
template <class T>
const uint64_t* gather(unsigned mask, T value, const char* operation) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  if (mask != 0xffffffffu) fail(std::string(operation) + " with a partial mask");
  Meeting& warp = warp_meetings[current / kWarp];
  uint64_t* values = warp.values[warp.generation % 2];
  std::memcpy(&values[current % kWarp], &value, sizeof(T));
  meet(warp, kWarp, operation);
  return values;
}

template <class T>
T value_of(const uint64_t* values, int lane) {
  T value;
  std::memcpy(&value, &values[lane], sizeof(T));
  return value;
}

template <class T>
T& shared_memory() {
  if (shared_block == nullptr) {
    const size_t bytes = (sizeof(T) + alignof(T) - 1) / alignof(T) * alignof(T);
    shared_block.reset(
        static_cast<char*>(std::aligned_alloc(std::max<size_t>(alignof(T), 16), (bytes + 15) / 16 * 16)));
    std::memset(shared_block.get(), 0xa7, bytes);
    if (find_races) {
      shared_image.assign(shared_block.get(), shared_block.get() + bytes);
      writes.assign(bytes, Write{});
    }
  }
  return *reinterpret_cast<T*>(shared_block.get());
}

inline void run_block() {
  running = threads;
  ready.clear();
  ready_head = 0;
  block_meeting.waiting.clear();
  for (Meeting& warp : warp_meetings) warp.waiting.clear();
  for (int t = 0; t < threads; ++t) {
    fibers[t].finished = false;
    make_context(fibers[t].context, fibers[t].stack.get(), fiber_entry);
    ready.push_back(t);
  }
  while (running > 0 && last_error == cudaSuccess) {
    if (ready.empty()) {
      fail("deadlock: not all threads reach the same barrier or collective");
      break;
    }
    run_fiber(next_fiber());
  }
  shared_block.reset();
}

inline void launch(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  threads = static_cast<int>(block.x * block.y * block.z);
  if (threads % kWarp != 0 || block.z != 1) {
    fail("the shim runs whole warps in one- and two-dimensional blocks only");
    return;
  }
  gridDim = grid;
  blockDim = block;
  body = &kernel;
  random_order.seed(seed);
  while (fibers.size() < static_cast<size_t>(threads)) {
    fibers.emplace_back();
    fibers.back().stack.reset(new char[kStackBytes]);
  }
  warp_meetings.resize(threads / kWarp);
  std::vector<unsigned> blocks(static_cast<size_t>(grid.x) * grid.y * grid.z);
  std::iota(blocks.begin(), blocks.end(), 0u);
  if (seed != 0) std::shuffle(blocks.begin(), blocks.end(), random_order);
  for (unsigned index : blocks) {
    blockIdx = dim3(index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y);
    run_block();
    if (last_error != cudaSuccess) return;
  }
}

}  // namespace shim

// ---------------------------------------------------------------- CUDA names
inline cudaError_t cudaGetLastError() {
  const cudaError_t error = shim::last_error;
  shim::last_error = cudaSuccess;
  return error;
}

// A launch begins when the one before is complete.
inline void cudaGridDependencySynchronize() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}

inline void __syncthreads() { shim::meet(shim::block_meeting, shim::threads, "__syncthreads"); }
inline void __syncwarp(unsigned mask = ~0u) { shim::gather(mask, 0, "__syncwarp"); }

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return shim::value_of<T>(shim::gather(mask, value, "__shfl_sync"), source & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  const int lane = shim::current & 31;
  return shim::value_of<T>(shim::gather(mask, value, "__shfl_xor_sync"), (lane ^ lanes) & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int lane = shim::current & 31, source = lane - static_cast<int>(delta);
  return shim::value_of<T>(shim::gather(mask, value, "__shfl_up_sync"), source < 0 ? lane : source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int lane = shim::current & 31, source = lane + static_cast<int>(delta);
  return shim::value_of<T>(shim::gather(mask, value, "__shfl_down_sync"), source > 31 ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  const uint64_t* values = shim::gather(mask, predicate, "__ballot_sync");
  unsigned bits = 0;
  for (int lane = 0; lane < shim::kWarp; ++lane)
    bits |= static_cast<unsigned>(shim::value_of<bool>(values, lane)) << lane;
  return bits;
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  const uint64_t* values = shim::gather(mask, value, "__reduce_add_sync");
  T sum = 0;
  for (int lane = 0; lane < shim::kWarp; ++lane) sum += shim::value_of<T>(values, lane);
  return sum;
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  const uint64_t* values = shim::gather(mask, value, "__reduce_min_sync");
  T least = shim::value_of<T>(values, 0);
  for (int lane = 1; lane < shim::kWarp; ++lane) least = std::min(least, shim::value_of<T>(values, lane));
  return least;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
T __ldg(const T* address) {
  shim::switch_point();
  return *address;
}
template <class T>
T atomicOr(T* address, T value) {
  shim::switch_point();
  const T old = *address;
  shim::store_atomically(address, static_cast<T>(old | value));
  return old;
}
template <class T>
T atomicAdd(T* address, T value) {
  shim::switch_point();
  const T old = *address;
  shim::store_atomically(address, static_cast<T>(old + value));
  return old;
}
template <class T>
T atomicMax(T* address, T value) {
  shim::switch_point();
  const T old = *address;
  shim::store_atomically(address, std::max(old, value));
  return old;
}
template <class T>
T atomicExch(T* address, T value) {
  shim::switch_point();
  const T old = *address;
  shim::store_atomically(address, value);
  return old;
}
template <class T>
T atomicCAS(T* address, T expected, T desired) {
  shim::switch_point();
  const T old = *address;
  if (old == expected) shim::store_atomically(address, desired);
  return old;
}
