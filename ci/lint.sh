#!/usr/bin/env bash
# Ruff's rules and formatting, and the packages' lockstep. Needs: ruff.
set -euo pipefail
cd "$(dirname "$0")/.."

ruff check .
ruff format --check .
python ci/check_lockstep.py
