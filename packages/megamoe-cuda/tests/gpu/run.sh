#!/usr/bin/env bash
# What decides whether the kernel may be claimed, on a machine with Hopper GPUs: `bash run.sh one|two|faults [arguments]`.
#   one     the whole matrix with virtual ranks, and what only GPUs show: sessions, block order, trace, engines, and what
#           can go wrong around a call (a process per rank; ranks share a GPU where there is one only)
#   two     EP1 and EP2 with a process per rank: over NVSHMEM where nvshmem4py is installed, else PyTorch symmetric memory.
#           A GPU each, or with MEGAMOE_RANKS_PER_GPU=2 one for both
#   faults  seeded faults in the kernel's headers, each of which must be caught
# Needs megamoe-core[test,transformers] and megamoe-cuda with NVRTC; logs go to $OUT, or the current directory.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out="${OUT:-.}"
kind="${1:?one, two or faults}"
shift
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
export MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe-cache}"
matrix=(python3 -m pytest -p claim -p distances -p megamoe.testing.plugin --backend=cuda --pyargs megamoe.testing.conformance)
options=(-q --tb=short -ra --timeout=120 -p no:cacheprovider)
status=0

if [ "$kind" = one ]; then
    python3 "$here/precompile.py" virtual || status=1
    for name in session stuck device_order trace engines faults; do
        file=("$here"/test_"$name"*.py)
        python3 -m pytest -p claim "${options[@]}" -s "${file[@]}" 2>&1 | tee "$out/$name.log" || status=1
    done
    "${matrix[@]}" --ranks=virtual "${options[@]}" "$@" 2>&1 | tee "$out/matrix-one.log" || status=1
elif [ "$kind" = faults ]; then
    python3 "$here/mutations.py" "$@" 2>&1 | tee "$out/faults.log" || status=1
else
    python3 "$here/precompile.py" processes || status=1
    provider=$(python3 -c 'from megamoe_cuda.symm_nvshmem import is_installed as i; print("nvshmem" if i() else "torch")')
    "${matrix[@]}" --ranks=processes --ep-sizes=1,2 "${options[@]}" "$@" 2>&1 | tee "$out/matrix-two-$provider.log" || status=1
fi
exit $status
