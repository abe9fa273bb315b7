// Programmatic dependent launch: a kernel's CTAs may take their places while the kernel before it in the stream still runs, which hides
// the launch's latency.
#pragma once
#include <cuda_runtime.h>

#include <utility>

namespace pw::ptx {

// Returns when all kernels before this one in the stream are complete and their writes are visible. Called before anything is read or
// written that they could touch.
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel take its place as soon as every CTA of this one has come here. It still waits as above.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Launches a kernel that calls wait_for_earlier_kernels() before it touches global memory.
template <class... Params, class... Args>
cudaError_t launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace pw::ptx
