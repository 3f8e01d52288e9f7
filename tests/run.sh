#!/usr/bin/env bash
# Build with the native tests and run everything: bash tests/run.sh [arguments for pytest]
# Uses the active virtual environment; makes .venv in the project folder when there is none.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z "${VIRTUAL_ENV:-}" ]]; then
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  source .venv/bin/activate
fi

python -m pip install --quiet --disable-pip-version-check \
  --config-settings=cmake.define.PYLLAMA_DFLASH_TESTS=ON ".[test,bench]"
build=$(echo build/cp310-abi3-*)

echo "== native tests"
ctest --test-dir "$build" --output-on-failure --no-tests=error
echo "== Python tests"
cd tests  # where the source folder does not shadow the installed package
pytest "$@"

# Other cases every day; what is found names its seed and case. FUZZ_SECONDS=0 leaves it out.
if [[ "${FUZZ_SECONDS:=60}" != 0 ]]; then
  echo "== mutated GGUF files for $FUZZ_SECONDS s"
  python -m fuzz --seed "$(date +%Y%j)" --seconds "$FUZZ_SECONDS"
fi
