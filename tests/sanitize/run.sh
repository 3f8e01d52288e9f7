#!/usr/bin/env bash
# Native code under AddressSanitizer and UndefinedBehaviorSanitizer on the CPU: bash tests/sanitize/run.sh
# Needs GCC and what tests/run.sh installed. Builds apart, in build/sanitize; reports and leaks fail.
set -euo pipefail
cd "$(dirname "$0")/../.."
[[ -n "${VIRTUAL_ENV:-}" ]] || source .venv/bin/activate
die() { echo "$*" >&2 && exit 1; }

echo "== build with sanitizers"
CC=gcc CXX=g++ python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
  --target build/sanitize/site --config-settings=build-dir=build/sanitize/cmake \
  --config-settings=install.strip=false --config-settings=cmake.define.PYLLAMA_DFLASH_SANITIZE=ON \
  --config-settings=cmake.define.PYLLAMA_DFLASH_TESTS=ON .

export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
echo "== native tests with sanitizers"
ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1 \
  ctest --test-dir build/sanitize/cmake --output-on-failure --no-tests=error

# The run time must come first in a Python that knows nothing of it. Every allocation of Python's is a malloc, so that
# what native code is given has edges. What an interpreter leaves at its end is not looked at: native.py counts instead.
sanitized() {
  LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=tests/sanitize:build/sanitize/site \
    python tests/sanitize/native.py "$@"
}

echo "== planted faults are found"
for planted in "overflow: heap-buffer-overflow" "undefined: signed integer overflow" "leak: planted leaks"; do
  ! output=$(sanitized --plant "${planted%%:*}" 2>&1) || die "the planted ${planted%%:*} was not found"
  [[ $output == *"${planted#*: }"* ]] || die "the planted ${planted%%:*} ended otherwise: $output"
done
echo "== texts, loading and mutated files with sanitizers"
sanitized
