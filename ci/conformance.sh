#!/usr/bin/env bash
# The conformance matrix on one backend: `bash ci/conformance.sh BACKEND [pytest arguments]`.
# Needs: megamoe-core[test] and the backend's package.
set -euo pipefail
cd "$(dirname "$0")/.."

backend="${1:?name a backend: reference, cuda or rocm}"
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest -p megamoe.testing.plugin --backend="$backend" --pyargs megamoe.testing.conformance "$@"
