"""A test double of CuPy: "device memory" is shared memory, NCCL is sockets between processes.

Put the folder that holds this package on PYTHONPATH, and `tests`. All lives in files in the folder
`FAKE_CUDA_DIR`, so that several processes are one machine with one GPU. As with CUDA, streams work
in the background, each piece after the delay of its stream (`FAKE_CUDA_DELAYS`), so that work
not waited for is missed; a communicator's constructor blocks until all ranks are there, and a
broadcast whose peer has died just never ends, unless `FAKE_NCCL_NOTICES` is set: then it is an
asynchronous error.

Faults, by files in that folder, for the process whose `FAKE_CUDA_NAME` is in the file's name:
`hang-init-NAME`, `hang-bcast-NAME`, `error-bcast-NAME`, `spoil-bcast-NAME` (each strikes once, and
then there is a file `hang-init-reached-NAME` and so on), `stay-hang-init-NAME` (every time).
"""

from cupy import cuda as cuda
