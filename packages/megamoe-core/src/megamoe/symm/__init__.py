"""Symmetric memory: a buffer on every rank that all ranks can load from and store to.

inproc      ranks are threads of one process
shm         ranks are processes of one machine, on CPU
torch_symm  ranks are GPUs, through torch.distributed._symmetric_memory (imported only when it is used)
agreement   how ranks find out together that one of them can't go on
"""

from megamoe.symm.base import Group, PeerMemory, SymmetricBuffer
from megamoe.symm.inproc import InprocGroup
from megamoe.symm.shm import ShmGroup

__all__ = ["Group", "InprocGroup", "PeerMemory", "ShmGroup", "SymmetricBuffer"]
