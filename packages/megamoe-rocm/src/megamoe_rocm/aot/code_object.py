"""A compiled kernel: its bytes and everything that can be read back from them.

Sources: LLVM AMDGPUUsage, "Kernel Descriptor" and "Code Object V5 Metadata".
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megamoe_rocm.aot import msgpack
from megamoe_rocm.aot.disassembly import TARGET, Instruction, disassemble
from megamoe_rocm.aot.elf import Elf
from megamoe_rocm.aot.errors import CodeObjectError
from megamoe_rocm.aot.occupancy import Occupancy, occupancy

WAVE_SIZE = 64
NT_AMDGPU_METADATA = 32
DESCRIPTOR = struct.Struct("<III4xq20xIIIHH4x")
PRELOAD_PROLOGUE_BYTES = 256  # instructions that only hardware without kernarg preloading runs


@dataclass(frozen=True, kw_only=True)
class KernelArgument:
    """One argument in the kernarg segment.

    Args:
        name: of the kernel's parameter, `hidden_…` for what the runtime passes, "" for scratch pointers of Triton's.
        type: Triton's spelling of the type, such as `*u8` or `i32`; "" where unknown.
        offset: bytes from the segment's start.
        num_bytes: size.
        kind: `global_buffer`, `by_value` or one of the metadata's hidden kinds.
    """

    name: str
    type: str
    offset: int
    num_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a wave or a workgroup of the kernel takes.

    Args:
        num_vgprs: unified vector registers a lane, architectural and accumulation together.
        num_agprs: accumulation registers among them.
        num_sgprs: scalar registers a wave.
        vgpr_spills: vector registers spilled; 0 in a shipped kernel.
        sgpr_spills: scalar registers spilled.
        scratch_bytes: private memory a lane; 0 in a shipped kernel.
        lds_bytes: LDS a workgroup, including what is given at launch.
        num_warps: waves a workgroup.
    """

    num_vgprs: int
    num_agprs: int
    num_sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    num_warps: int


@dataclass(frozen=True, kw_only=True)
class KernelDescriptor:
    """The 64 bytes from which the hardware starts a wave.

    Args:
        entry: address of the first instruction.
        kernarg_bytes: size of the kernarg segment.
        rsrc1, rsrc2, rsrc3: COMPUTE_PGM_RSRC1 to 3.
        properties: KERNEL_CODE_PROPERTIES, which user SGPRs are set up.
        preload: KERNARG_PRELOAD: dwords to preload in the low seven bits, the first dword above.
    """

    entry: int
    kernarg_bytes: int
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    preload: int

    @property
    def num_user_sgprs(self) -> int:
        """SGPRs set up before the workgroup ids."""
        return (self.rsrc2 >> 1) & 0x1F

    @property
    def preload_dwords(self) -> int:
        """Kernarg dwords that arrive in user SGPRs."""
        return self.preload & 0x7F

    @property
    def preload_first_dword(self) -> int:
        """Which dword of the kernarg segment is preloaded first."""
        return self.preload >> 7

    @property
    def denormals_kept(self) -> bool:
        """Whether the wave starts with denormals kept in FP32 and in FP16 and FP64."""
        return (self.rsrc1 >> 16) & 0xF == 0xF

    @property
    def round_to_nearest_even(self) -> bool:
        """Whether the wave starts rounding to nearest even everywhere."""
        return (self.rsrc1 >> 12) & 0xF == 0

    @property
    def ieee_mode(self) -> bool:
        """Whether minimum and maximum quiet signalling NaNs."""
        return bool((self.rsrc1 >> 23) & 1)

    @property
    def workgroup_id_sgprs(self) -> tuple[bool, bool, bool]:
        """Which of the workgroup's three coordinates arrive in SGPRs."""
        return bool(self.rsrc2 >> 7 & 1), bool(self.rsrc2 >> 8 & 1), bool(self.rsrc2 >> 9 & 1)

    @property
    def workgroup_info_sgpr(self) -> bool:
        """Whether an SGPR with the wave's place in its workgroup follows the ids."""
        return bool(self.rsrc2 >> 10 & 1)

    @property
    def workitem_id_vgpr_dims(self) -> int:
        """How many coordinates of the work item v0 packs, ten bits each: 1, 2 or 3."""
        return (self.rsrc2 >> 11 & 3) + 1


@dataclass(frozen=True, kw_only=True)
class CodeObject:
    """A gfx950 kernel as it ships.

    Args:
        hsaco: the ELF file's bytes.
        arguments: the kernarg segment.
        lds_bytes: LDS that the launch gives; the file holds only what is statically allocated.
        build: what made it: compiler version, constants, options. Free-form, for messages and provenance.
        assembly: the compiler's own listing, "" after loading.
    """

    hsaco: bytes = field(repr=False)
    arguments: tuple[KernelArgument, ...]
    lds_bytes: int
    build: dict[str, Any]
    assembly: str = field(default="", repr=False)

    @classmethod
    def from_bytes(
        cls,
        hsaco: bytes,
        *,
        lds_bytes: int,
        parameters: tuple[tuple[str, str], ...] = (),
        build: dict[str, Any] | None = None,
        assembly: str = "",
    ) -> CodeObject:
        """Read a code object.

        Args:
            hsaco: the ELF file's bytes; one kernel.
            lds_bytes: LDS given at launch.
            parameters: name and type of the kernel's own arguments, in order; the metadata has no names.
            build: provenance.
            assembly: the compiler's listing.

        Raises:
            CodeObjectError: not a gfx950 code object of one kernel, or `parameters` don't fit it.
        """
        metadata = kernel_metadata(Elf(hsaco))
        arguments = _arguments(metadata, parameters)
        return cls(hsaco=hsaco, arguments=arguments, lds_bytes=lds_bytes, build=build or {}, assembly=assembly)

    @cached_property
    def elf(self) -> Elf:
        """The parsed file."""
        return Elf(self.hsaco)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The kernel's entry in the code object's metadata."""
        return kernel_metadata(self.elf)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.metadata[".name"])

    @cached_property
    def sha256(self) -> str:
        """Hash of the bytes, hexadecimal."""
        return hashlib.sha256(self.hsaco).hexdigest()

    @cached_property
    def resources(self) -> Resources:
        """Registers, spills, scratch, LDS and waves."""
        data = self.metadata
        return Resources(
            num_vgprs=data[".vgpr_count"],
            num_agprs=data[".agpr_count"],
            num_sgprs=data[".sgpr_count"],
            vgpr_spills=data[".vgpr_spill_count"],
            sgpr_spills=data[".sgpr_spill_count"],
            scratch_bytes=data[".private_segment_fixed_size"],
            lds_bytes=data[".group_segment_fixed_size"] + self.lds_bytes,
            num_warps=data[".max_flat_workgroup_size"] // WAVE_SIZE,
        )

    @cached_property
    def occupancy(self) -> Occupancy:
        """Workgroups a compute unit holds."""
        used = self.resources
        return occupancy(
            num_vgprs=used.num_vgprs,
            num_sgprs=used.num_sgprs,
            lds_bytes=used.lds_bytes,
            num_warps=used.num_warps,
        )

    @cached_property
    def descriptor(self) -> KernelDescriptor:
        """The kernel descriptor."""
        symbol = str(self.metadata[".symbol"])
        address = next(item.address for item in self.elf.symbols() if item.name == symbol)
        section = self.elf.section(".rodata")
        raw = section.data[address - section.address :]
        _, _, kernarg, entry, rsrc3, rsrc1, rsrc2, properties, preload = DESCRIPTOR.unpack_from(raw)
        return KernelDescriptor(
            entry=address + entry,
            kernarg_bytes=kernarg,
            rsrc1=rsrc1,
            rsrc2=rsrc2,
            rsrc3=rsrc3,
            properties=properties,
            preload=preload,
        )

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The kernel's instructions, disassembled from its bytes; without the padding after its end."""
        symbol = next(item for item in self.elf.symbols() if item.name == self.name)
        end = symbol.address + symbol.num_bytes
        return tuple(item for item in disassemble(self.hsaco) if symbol.address <= item.address < end)

    def save(self, stem: Path) -> None:
        """Write `stem`.hsaco and `stem`.json."""
        stem.with_suffix(".hsaco").write_bytes(self.hsaco)
        parameters = [(item.name, item.type) for item in self.arguments if item.name and item.type]
        record = {
            "kernel": self.name,
            "sha256": self.sha256,
            "lds_bytes": self.lds_bytes,
            "parameters": parameters,
            "resources": asdict(self.resources),
            "workgroups_per_cu": self.occupancy.workgroups_per_cu,
            "build": self.build,
        }
        stem.with_suffix(".json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")

    @classmethod
    def load(cls, stem: Path) -> CodeObject:
        """Read what `save` wrote.

        Raises:
            CodeObjectError: the bytes are not the ones that the JSON file describes.
        """
        hsaco = stem.with_suffix(".hsaco").read_bytes()
        record = json.loads(stem.with_suffix(".json").read_text())
        parameters = tuple((name, kind) for name, kind in record["parameters"])
        code = cls.from_bytes(hsaco, lds_bytes=record["lds_bytes"], parameters=parameters, build=record["build"])
        if code.sha256 != record["sha256"]:
            raise CodeObjectError(
                f"{stem.name}.hsaco is not the file that {stem.name}.json describes",
                got=code.sha256,
                expected=record["sha256"],
                hint="build the code objects again",
            )
        return code


def kernel_metadata(elf: Elf) -> dict[str, Any]:
    """The metadata of the one kernel in a gfx950 code object."""
    notes = [content for owner, kind, content in elf.notes() if (owner, kind) == ("AMDGPU", NT_AMDGPU_METADATA)]
    if not notes:
        raise CodeObjectError("an ELF file without AMD GPU metadata")
    metadata = msgpack.decode(notes[0])
    target, kernels = metadata.get("amdhsa.target", ""), metadata["amdhsa.kernels"]
    if not str(target).endswith(TARGET):
        raise CodeObjectError("a code object for another target", got=target, expected=TARGET)
    if len(kernels) != 1:
        raise CodeObjectError("a code object with other than one kernel", got=[kernel[".name"] for kernel in kernels])
    kernel: dict[str, Any] = kernels[0]
    return kernel


def _arguments(metadata: dict[str, Any], parameters: tuple[tuple[str, str], ...]) -> tuple[KernelArgument, ...]:
    entries = metadata.get(".args", [])
    visible = sum(not entry[".value_kind"].startswith("hidden_") for entry in entries)
    if len(parameters) > visible:
        raise CodeObjectError("more parameters than arguments", got=[name for name, _ in parameters], expected=visible)
    padded = [*parameters, *[("", "")] * (len(entries) - len(parameters))]
    return tuple(
        KernelArgument(
            name=entry[".value_kind"] if entry[".value_kind"].startswith("hidden_") else name,
            type=kind,
            offset=entry[".offset"],
            num_bytes=entry[".size"],
            kind=entry[".value_kind"],
        )
        for entry, (name, kind) in zip(entries, padded)
    )
