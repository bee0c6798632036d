#!/usr/bin/env bash
# Build wheels and sdists into dist/ and check them. Needs: build, hatchling, megamoe-rocm with its Triton, whose code
# objects are built for the wheel and removed afterwards, so that no later run takes them for those of changed sources.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist
trap 'rm -rf packages/megamoe-rocm/src/megamoe_rocm/code_objects' EXIT
megamoe-rocm compile | tail -n 1
for package in megamoe-core megamoe-cuda megamoe-rocm; do
    # Both from the tree: a wheel that is built from an sdist has no code objects.
    python -m build --no-isolation --sdist --wheel --outdir dist "packages/$package"
done
python ci/check_wheels.py dist
