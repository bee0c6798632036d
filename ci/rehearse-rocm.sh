#!/usr/bin/env bash
# The conformance matrix on the ROCm kernels without a gfx950: `bash ci/rehearse-rocm.sh interpreter|isa|nvidia [pytest
# arguments]`. Needs: megamoe-core[test], megamoe-rocm, Triton; for isa also llvm-objdump 20 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

export MEGAMOE_ROCM_DEVICE="${1:?interpreter, isa or nvidia}"
shift
case "$MEGAMOE_ROCM_DEVICE" in
interpreter)
    export TRITON_INTERPRET=1
    set -- --device=cpu --timeout=3600 "$@" # some tests are sixty calls, of seconds each
    ;;
isa)
    # Of four and eight ranks a call takes half a minute and more: `--ep-sizes=4,8` runs them all the same.
    set -- --device=cpu --timeout=3600 --ep-sizes=1,2 "$@"
    ;;
*) set -- --device=cuda "$@" ;;
esac
# Claimed for this run, which finds out whether it may be; padding rows overflow, as they may.
bash ci/conformance.sh rocm -p megamoe_rocm.claimed -W ignore::RuntimeWarning "$@"
