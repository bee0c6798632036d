#!/usr/bin/env bash
# A machine with several Hopper GPUs, a rank each: `bash all_gpus.sh matrix|bench|all`, each part within ten minutes.
#   matrix  the conformance matrix at EP = number of ranks, over NVSHMEM and over PyTorch symmetric memory, the cases of
#           late and killed ranks among them; then the kernels of megamoe-rocm, where they are installed
#   bench   the suite seed-sm90: uniform routing at every EP size the GPUs allow, the EP8-equivalent rows, the peers
# With MEGAMOE_RANKS_PER_GPU=N the matrix has N ranks on each GPU, so that one GPU rehearses it; the bench never shares.
# Results are JSON files in $OUT. Environment: NVSHMEM_SITE, a folder on no path with nvshmem4py; PEERS_SITE, one with the
# peers; PART_LIMIT_S, the limit of one part of the matrix (170).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out="${OUT:-.}"
what="${1:?matrix, bench or all}"
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 MEGAMOE_CACHE_DIR="${MEGAMOE_CACHE_DIR:-/tmp/megamoe-cache}"
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus * ${MEGAMOE_RANKS_PER_GPU:-1}))
site="${PYTHONPATH:-}"
status=0

# name, where more packages are, backend, pytest's further arguments
matrix() {
    local name=$1 more=$2 backend=$3
    shift 3
    echo "== $name, $ranks ranks on $gpus GPUs"
    (cd "$here" && OUTCOMES="$out/conformance-$name-ep$ranks.json" PYTHONPATH="$here:$site:$more" \
        timeout "${PART_LIMIT_S:-170}" python3 -m pytest -p claim -p outcomes -p megamoe.testing.plugin \
        --backend="$backend" --device=cuda --ranks=processes --ep-sizes="$ranks" --pyargs megamoe.testing.conformance \
        -q --tb=short --timeout=90 -p no:cacheprovider "$@") || status=1
}

if [ "$what" != bench ]; then
    PYTHONPATH="$here:$site" python3 "$here/precompile.py" processes "$ranks" || status=1
    [ -z "${NVSHMEM_SITE:-}" ] || matrix cuda-nvshmem "$NVSHMEM_SITE" cuda -m "smoke or shapes or edge"
    matrix cuda-torch "" cuda -m "smoke or shapes or edge"
    if python3 -c 'import megamoe_rocm, triton' 2>/dev/null; then matrix rocm-torch "" rocm -m "smoke or edge"; fi
fi
if [ "$what" != matrix ]; then
    unset MEGAMOE_RANKS_PER_GPU
    PYTHONPATH="$here:$site" python3 "$here/precompile.py" bench "$gpus" || status=1
    PYTHONPATH="$site:${PEERS_SITE:-}" timeout "${BENCH_LIMIT_S:-500}" python3 -m megamoe.cli bench --suite seed-sm90 \
        --output "$out/seed-sm90-ep$gpus.json" || status=1
fi
exit $status
