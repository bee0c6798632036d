#!/usr/bin/env bash
# Compile every CUDA kernel for sm_90a, without a GPU. Fails where one spills, exceeds its budget of registers or shared
# memory, or has its WGMMAs serialised. Needs megamoe-cuda with the extra compile-cu12 or compile-cu13.
set -euo pipefail
cd "$(dirname "$0")/.."

# A cache of its own: what is reported was compiled now, by this compiler.
MEGAMOE_CACHE_DIR=$(mktemp -d)
export MEGAMOE_CACHE_DIR
trap 'rm -rf "$MEGAMOE_CACHE_DIR"' EXIT
megamoe-cuda compile "$@"
