#!/usr/bin/env bash
# mypy --strict (set in pyproject.toml) on host code. Needs: mypy, nox, the dependencies of megamoe-core.
set -euo pipefail
cd "$(dirname "$0")/.."

mypy packages/megamoe-core/src packages/megamoe-cuda/src packages/megamoe-rocm/src
mypy noxfile.py ci/*.py examples/*.py packages/megamoe-core/hatch_build.py
