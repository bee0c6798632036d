#!/usr/bin/env bash
# The main job: one MoE layer of a checkpoint file, over four processes. Needs: megamoe-core.
# Arguments go to `megamoe run`.
set -euo pipefail
cd "$(dirname "$0")/.."

checkpoint=build/demo/checkpoint
if [ ! -e "$checkpoint" ]; then
    python examples/make_checkpoint.py "$checkpoint"
fi
megamoe run --checkpoint "$checkpoint" --layer 0 --ep 4 --mode a8w8 --backend auto "$@"
