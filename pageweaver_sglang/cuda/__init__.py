"""All that knows CUDA: the loader of the kernel library, thin wrappers around its functions, and what it supports."""
