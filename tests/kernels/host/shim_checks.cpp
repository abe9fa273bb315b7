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

}  // namespace

extern "C" __attribute__((visibility("default"))) int run(int which, uint64_t seed, int* out) {
  void (*const kernels[])(int*) = {reverse, warp_votes, barrier_in_a_branch, lanes_apart, partial_mask};
  shim::message.clear();
  shim::seed = seed;
  PW_LAUNCH(kernels[which], dim3(which == 0 ? 3 : 1), dim3(64), nullptr, out);
  return cudaGetLastError();
}

extern "C" __attribute__((visibility("default"))) const char* message() { return shim::message.c_str(); }
