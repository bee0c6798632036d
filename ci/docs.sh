#!/usr/bin/env bash
# Build the documentation into site/. Needs: mkdocs, mkdocs-material.
set -euo pipefail
cd "$(dirname "$0")/.."

NO_MKDOCS_2_WARNING=1 mkdocs build --strict "$@"
