#!/usr/bin/env bash
# The main job: one MoE layer of a checkpoint file, over four processes. Needs: megamoe-core.
# Arguments go to `megamoe run`.
set -euo pipefail
cd "$(dirname "$0")/.."

checkpoint=build/demo/checkpoint
if [ ! -d "$checkpoint" ]; then
    rm -rf "$checkpoint.partial" # of an interrupted run
    mkdir -p "$checkpoint.partial"
    python examples/make_checkpoint.py "$checkpoint.partial/moe.safetensors"
    mv "$checkpoint.partial" "$checkpoint"
fi
megamoe run --checkpoint "$checkpoint/moe.safetensors" --layer 0 --ep 4 --mode a8w8 --backend auto "$@"
