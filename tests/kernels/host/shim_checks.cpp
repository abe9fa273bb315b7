// Kernels that are wrong on purpose, and one that is right, for tests/kernels/test_host_shim.py.
#include "cuda_host_shim.h"

namespace {

struct Shared {
  int values[64];
};

__global__ void reverse(int* out) {
  PW_SHARED(Shared, shared);
  shared.values[threadIdx.x] = static_cast<int>(threadIdx.x + blockIdx.x);
  __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = shared.values[63 - threadIdx.x];
}

__global__ void warp_votes(int* out) {
  const int lane = threadIdx.x % 32;
  const unsigned odd = __ballot_sync(~0u, lane % 2);
  const int sum = __reduce_add_sync(~0u, lane);
  const unsigned least = __reduce_min_sync(~0u, 100u - lane);
  const int up = __shfl_up_sync(~0u, lane, 2), down = __shfl_down_sync(~0u, lane, 2);
  out[threadIdx.x] = odd == 0xaaaaaaaau && sum == 496 && least == 69 && up == (lane < 2 ? lane : lane - 2) &&
                     down == (lane > 29 ? lane : lane + 2) && __shfl_sync(~0u, lane, 5) == 5 &&
                     __shfl_xor_sync(~0u, lane, 4) == (lane ^ 4);
}

__global__ void barrier_in_a_branch(int*) {
  if (threadIdx.x < 40) __syncthreads();
}

__global__ void lanes_apart(int*) {
  if (threadIdx.x % 2)
    __ballot_sync(~0u, true);
  else
    __reduce_add_sync(~0u, 1);
}

__global__ void partial_mask(int*) { __syncwarp(0xffff); }

__global__ void all_store(int*) {
  PW_SHARED(Shared, shared);
  shared.values[0] = static_cast<int>(threadIdx.x);
}

__global__ void store_and_add(int*) {
  PW_SHARED(Shared, shared);
  if (threadIdx.x == 3)
    shared.values[0] = 1;
  else
    atomicAdd(&shared.values[0], 1);
}

// A barrier of the CTA orders every store, __syncwarp those of the warp, a shuffle none.
__global__ void stores_in_turn(int* out) {
  PW_SHARED(Shared, shared);
  for (int turn = 0; turn < 3; ++turn) {
    if (static_cast<int>(threadIdx.x) == 40 * turn % 64) shared.values[0] = 100 + turn;
    __syncthreads();
  }
  atomicAdd(&shared.values[0], 1);
  for (int turn = 0; turn < 3; ++turn) {
    if (static_cast<int>(threadIdx.x) == 32 + turn) shared.values[1] = turn;
    __syncwarp();
  }
  __syncthreads();
  out[threadIdx.x] = shared.values[0] == 166 && shared.values[1] == 2;
}

__global__ void shuffle_is_no_barrier(int*) {
  PW_SHARED(Shared, shared);
  for (int turn = 0; turn < 2; ++turn) {
    if (static_cast<int>(threadIdx.x) == turn) shared.values[1] = turn;
    __shfl_sync(~0u, turn, 0);
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int run(int which, uint64_t seed, int find_races,
                                                                 int* out) {
  void (*const kernels[])(int*) = {reverse,   warp_votes,    barrier_in_a_branch, lanes_apart,          partial_mask,
                                 all_store, store_and_add, stores_in_turn,      shuffle_is_no_barrier};
  shim::message.clear();
  shim::seed = seed;
  shim::find_races = find_races != 0;
  PW_LAUNCH(kernels[which], dim3(which == 0 ? 3 : 1), dim3(64), nullptr, out);
  return cudaGetLastError();
}

extern "C" __attribute__((visibility("default"))) const char* message() { return shim::message.c_str(); }
