"""An interpreter of the gfx950 instruction set: executes code objects on the CPU, lane by lane, with numpy.

machine = Machine(num_ranks=2, seed=1)
x = machine.buffer(values, rank=0, name="x", peers=True)
machine.launch(Program.load(code), rank=0, grid=8, arguments={"x": x, "n": 100})
machine.run()
x.read(np.float32)
"""

from megamoe_rocm.isa.address_space import Buffer
from megamoe_rocm.isa.errors import (
    DeadlockError,
    ExecutionFault,
    IsaError,
    LaunchArgumentsError,
    LdsRaceFault,
    MemoryFault,
    PendingRegisterFault,
    UndefinedFault,
    UnsupportedInstructionError,
)
from megamoe_rocm.isa.machine import Machine
from megamoe_rocm.isa.program import Program

__all__ = [
    "Machine",
    "Program",
    "Buffer",
    "IsaError",
    "DeadlockError",
    "ExecutionFault",
    "LaunchArgumentsError",
    "LdsRaceFault",
    "MemoryFault",
    "PendingRegisterFault",
    "UndefinedFault",
    "UnsupportedInstructionError",
]
