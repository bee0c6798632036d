#!/usr/bin/env bash
# Build the documentation into site/. Needs: mkdocs, mkdocs-material.
set -euo pipefail
cd "$(dirname "$0")/.."

mkdocs build --strict "$@"
