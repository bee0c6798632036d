"""Mori's shmem as megamoe_rocm calls it, on plain memory: signatures and behaviour of amd-mori 1.2.4.

A thread stands for a process. What the library answers with the end of the process ends the test here. Tests set
`failing` to have a call fail as the library does.
"""

import os
import threading

import numpy as np

MORI_SHMEM_INIT_WITH_MPI_COMM = 0
MORI_SHMEM_INIT_WITH_UNIQUEID = 1
HEAP_INITIAL_OFFSET = 256  # src/shmem/init.cpp
UNITS = {"G": 1 << 30, "M": 1 << 20}

_shmem_module_loaded_gpus: set = set()
failing: set = set()  # "init", or (pe, pe) between which there is no peer-to-peer path
heaps: dict = {}  # (unique id, pe) -> the heap's bytes
_state = threading.local()


def _own():
    """This rank's state; the library reads through a null pointer before it is initialised."""
    assert hasattr(_state, "pe"), "Mori is not initialised: the process would end here"
    return _state


def shmem_get_unique_id() -> bytes:
    return os.urandom(128)


def shmem_init_attr(flags: int, rank: int, nranks: int, unique_id: bytes):
    assert flags == MORI_SHMEM_INIT_WITH_UNIQUEID
    assert len(unique_id) == 128
    assert not hasattr(_state, "pe"), "initialised twice"
    _shmem_module_loaded_gpus.add(rank)  # the device's number; here each rank has that of its own
    if "init" in failing:
        return -1
    text = os.environ["MORI_SHMEM_HEAP_SIZE"]
    size = int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)
    _state.pe, _state.num_pes, _state.uid, _state.used = rank, nranks, unique_id, HEAP_INITIAL_OFFSET
    _state.freed = []
    heaps[unique_id, rank] = np.full(size, 0xA5, dtype=np.uint8)
    return 0


def shmem_mype() -> int:
    return _own().pe


def shmem_npes() -> int:
    return _own().num_pes


def shmem_malloc(size: int) -> int:
    own = _own()
    heap = heaps[own.uid, own.pe]
    if size == 0 or own.used + size > heap.size:
        return 0
    own.used += size
    return heap.ctypes.data + own.used - size


def shmem_free(ptr: int):
    _own().freed.append(ptr)


def shmem_ptr_p2p(dest_ptr: int, my_pe: int, dest_pe: int) -> int:
    own = _own()
    assert my_pe == own.pe
    if (my_pe, dest_pe) in failing:
        return 0
    while (own.uid, dest_pe) not in heaps:  # initialisation is a collective
        pass
    return dest_ptr - heaps[own.uid, my_pe].ctypes.data + heaps[own.uid, dest_pe].ctypes.data
