"""GPUs for planes `nccl` and `cuda_ipc`: CUDA, and the worker processes."""
