class CUDADriverError(RuntimeError):
    status: int
