#!/usr/bin/env bash
# An adapter against its engine's own classes, on the CPU. Needs: ci/engines/ENGINE.txt, megamoe-core.
# Usage: ci/engines.sh vllm|sglang [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

engine="$1"
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export HF_HUB_OFFLINE=1 # no test may reach for a model hub
python -c "import importlib.metadata as m; print('$engine', m.version('$engine'))" # else all of it would be skipped
python -m pytest "tests/engines/$engine" "$@"
