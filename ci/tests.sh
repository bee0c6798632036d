#!/usr/bin/env bash
# Unit tests of all packages and the tests that span them. Needs: all packages, megamoe-core[test,transformers,plots].
# Arguments go to pytest. Without, the whole suite runs in two processes, each file in one of them; needs pytest-xdist.
set -euo pipefail
cd "$(dirname "$0")/.."

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start several processes; one thread each keeps them from fighting
export HF_HUB_OFFLINE=1                         # no test may reach for a model hub
selection=(-m "not slow and not gpu and not multigpu")
if [ $# -gt 0 ]; then
    python -m pytest "${selection[@]}" "$@"
else
    python -m pytest "${selection[@]}" -n 2 --dist=loadfile
    # `nox -s conformance-reference` runs the other layers.
    bash ci/conformance.sh reference -m smoke
    bash ci/rehearse-rocm.sh interpreter -m smoke -k "plain-a4w4-ep2 or plain-a8w4-fp8p2p-ep2"
fi
