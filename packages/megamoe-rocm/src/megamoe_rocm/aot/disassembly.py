"""The instructions of a code object, read back from its bytes with LLVM's disassembler.

The bytes are the truth: what is inspected and executed is what a wheel ships, not the text a compiler printed on the
way. Triton ships LLVM without a disassembler, so this needs `llvm-objdump` of LLVM 20 or newer: on Debian and Ubuntu
`apt-get install llvm-22`, in a ROCm installation it is under `llvm/bin`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from megamoe_rocm.aot.errors import CodeObjectError, ToolchainError

TARGET = "gfx950"
OBJDUMPS = (
    "llvm-objdump-22", "llvm-objdump-23", "llvm-objdump-21", "llvm-objdump-20",
    "/opt/rocm/llvm/bin/llvm-objdump", "llvm-objdump",
)  # fmt: skip
HINT = "install it, on Debian and Ubuntu: apt-get install --no-install-recommends llvm-22"

LINE = re.compile(r"^\t(?P<text>[a-z]\S*(?: [^/]*)?)\s*// (?P<address>[0-9A-F]{12}): (?P<words>[0-9A-F ]+?)(?: <.*>)?$")
# A name with a value: `offset:16`, `op_sel:[0,1]`. What stands before it tells it from a register range like `v[0:3]`.
MODIFIER = re.compile(r"(?:^|\s)(?P<name>[a-z_]\w*):(?P<value>\[[^\]]*\]|\S+)")
# Modifiers without a value, which stand after the operands; a bare `lds` is one of a buffer load.
FLAGS = frozenset(["sc0", "sc1", "nt", "offen", "idxen", "lds", "clamp", "row_mirror", "row_half_mirror", "gds", "tfe"])


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One machine instruction.

    Args:
        address: of its first byte, in the code object's memory image.
        mnemonic: as LLVM prints it, with the encoding suffix (`v_add_u32_e32`).
        operands: destination first, as printed.
        modifiers: name -> value; "" for flags such as `sc0`.
        words: the encoding, 32 bits each.
        text: the printed line, for messages.
    """

    address: int
    mnemonic: str
    operands: tuple[str, ...]
    modifiers: dict[str, str] = field(default_factory=dict)
    words: tuple[int, ...]
    text: str

    @property
    def num_bytes(self) -> int:
        """Length of the encoding."""
        return 4 * len(self.words)

    @property
    def branch_target(self) -> int:
        """Address that a branch goes to: SIMM16 counts dwords from the next instruction."""
        offset = self.words[0] & 0xFFFF
        return self.address + 4 + 4 * (offset - 0x10000 if offset & 0x8000 else offset)

    def has(self, *flags: str) -> bool:
        """Whether all these modifiers are set."""
        return all(flag in self.modifiers for flag in flags)

    def __str__(self) -> str:
        return f"{self.address:#x}: {self.text}"


@cache
def objdump() -> str:
    """Path of a disassembler that knows gfx950.

    Raises:
        ToolchainError: there is none.
    """
    found = [path for path in map(shutil.which, OBJDUMPS) if path is not None]
    for path in found:
        help_text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"LLVM version (\d+)", help_text)
        if version is not None and int(version[1]) >= 20 and "amdgcn" in help_text:
            return path
    raise ToolchainError(
        "no llvm-objdump that knows gfx950", got=found or "none", expected="LLVM 20 or newer", hint=HINT
    )


def disassemble(hsaco: bytes) -> tuple[Instruction, ...]:
    """All instructions of a code object's text section, in order.

    Raises:
        ToolchainError: no disassembler.
        CodeObjectError: it can't read the file, or a line is not understood.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.hsaco"
        path.write_bytes(hsaco)
        command = [objdump(), "-d", f"--mcpu={TARGET}", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CodeObjectError("the disassembler refused the code object", got=done.stderr.strip())
    return tuple(parse_line(line) for line in done.stdout.splitlines() if line.startswith("\t"))


def parse_line(line: str) -> Instruction:
    """One line of `llvm-objdump -d`."""
    match = LINE.match(line)
    if match is None:
        raise CodeObjectError("a line of disassembly that is not understood", got=line.strip())
    text = match["text"].strip()
    mnemonic, _, rest = text.partition(" ")
    operands, modifiers = split_operands(rest)
    return Instruction(
        address=int(match["address"], 16),
        mnemonic=mnemonic,
        operands=operands,
        modifiers=modifiers,
        words=tuple(int(word, 16) for word in match["words"].split()),
        text=text,
    )


def split_operands(rest: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Operands and modifiers of an instruction's text after its mnemonic."""
    modifiers = {match["name"]: match["value"] for match in MODIFIER.finditer(rest)}
    operands = []
    for part in split_commas(MODIFIER.sub("", rest)):
        words = part.split()
        while len(words) > 1 and words[-1] in FLAGS:
            modifiers[words.pop()] = ""
        operands.append(" ".join(words))
    if operands and operands[-1] in FLAGS:
        modifiers[operands.pop()] = ""
    return tuple(operand for operand in operands if operand), modifiers


def split_commas(text: str) -> list[str]:
    """Split at commas outside of brackets and parentheses."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return parts
