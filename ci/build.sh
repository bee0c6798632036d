#!/usr/bin/env bash
# Build wheels and sdists into dist/ and check them. Needs: build, hatchling.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf dist
for package in megamoe-core megamoe-cuda megamoe-rocm; do
    python -m build --no-isolation --outdir dist "packages/$package"
done
python ci/check_wheels.py dist
