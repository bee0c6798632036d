#!/usr/bin/env bash
# The conformance matrix on the ROCm kernels without a gfx950: `bash ci/rehearse-rocm.sh interpreter|isa|nvidia [pytest
# arguments]`. Needs: megamoe-core[test], megamoe-rocm, Triton; for isa also llvm-objdump 20 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

export MEGAMOE_ROCM_DEVICE="${1:?interpreter, isa or nvidia}"
shift
device=cpu
[ "$MEGAMOE_ROCM_DEVICE" = nvidia ] && device=cuda
[ "$MEGAMOE_ROCM_DEVICE" = interpreter ] && export TRITON_INTERPRET=1
# Claimed for this run, which finds out whether it may be; padding rows overflow, as they may.
bash ci/conformance.sh rocm -p megamoe_rocm.claimed --device="$device" -W ignore::RuntimeWarning "$@"
