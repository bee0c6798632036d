#!/usr/bin/env bash
# The disassembler that tests of megamoe-rocm need, from Debian's packages; as root. Without CI set, tests that need it skip.
set -euo pipefail

command -v llvm-objdump-22 >/dev/null && exit 0
apt-get update -qq
apt-get install -qq --no-install-recommends llvm-22 >/dev/null
