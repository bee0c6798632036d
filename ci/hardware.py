"""Say whether this machine has the GPUs that a backend's sessions need; needs nothing but the standard library.

Usage: `python ci/hardware.py cuda|rocm`. Exit status 0: present; 1: missing, with the reason on standard error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # where the amdgpu kernel driver lists its GPUs
GFX950 = "90500"  # gfx_target_version of gfx950: major * 10000 + minor * 100 + stepping
SM90 = "9.0"


def missing_cuda() -> str | None:
    """Why the CUDA sessions cannot run here, or None."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver: nvidia-smi is not on the path"
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return f"nvidia-smi failed: {(answer.stdout + answer.stderr).strip()}"
    capabilities = answer.stdout.split()
    if SM90 not in capabilities:
        return f"no GPU of compute capability {SM90} (Hopper); found {', '.join(capabilities) or 'no GPU'}"
    return None


def missing_rocm(nodes: Path = KFD_NODES) -> str | None:
    """Why the ROCm sessions cannot run here, or None. Reads the kernel driver's list, so ROCm itself may be absent."""
    if not nodes.is_dir():
        return f"no AMD GPU driver: {nodes} does not exist"
    text = "\n".join(file.read_text() for file in sorted(nodes.glob("*/properties")))
    versions = [version for version in re.findall(r"^gfx_target_version (\d+)$", text, re.MULTILINE) if version != "0"]
    if GFX950 not in versions:
        return f"no gfx950 GPU (gfx_target_version {GFX950}); found {', '.join(versions) or 'no GPU'}"
    return None


def main(arguments: list[str]) -> int:
    checks = {"cuda": missing_cuda, "rocm": missing_rocm}
    if len(arguments) != 1 or arguments[0] not in checks:
        print(__doc__, file=sys.stderr)
        return 2
    reason = checks[arguments[0]]()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
