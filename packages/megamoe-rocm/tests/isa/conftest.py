"""Helpers of these tests are modules beside them; tests of compiled kernels need Triton and LLVM's disassembler."""

import os
import sys
from pathlib import Path

import pytest

from megamoe_rocm.aot.compiler import import_triton
from megamoe_rocm.aot.disassembly import objdump
from megamoe_rocm.aot.errors import ToolchainError

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def toolchain() -> None:
    """Triton and a disassembler that knows gfx950. Where one is missing the test is skipped; in CI it fails."""
    try:
        import_triton()
        objdump()
    except ToolchainError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
