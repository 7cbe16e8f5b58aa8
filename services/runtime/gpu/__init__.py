"""GPUs for planes `nccl` and `cuda_ipc`: CUDA, the agent processes, and a receiver's intakes."""
