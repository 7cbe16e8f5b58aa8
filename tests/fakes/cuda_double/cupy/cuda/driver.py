"""The driver's errors of the double."""


class CUDADriverError(RuntimeError):
    pass
