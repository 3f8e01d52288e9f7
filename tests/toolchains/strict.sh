#!/usr/bin/env bash
# strict.sh LOG COMMAND... : runs a compiler; a warning that points into our sources (.../dflash/...) is an error.
# Upstream's stay in LOG: its headers are not written for the warnings that we ask for.
set -euo pipefail

log=$1
shift
if ! "$@" >"$log" 2>&1; then
  cat "$log" >&2
  exit 1
fi
if grep -A 3 -E '/dflash/[^/ ]+[:(][0-9].*warning' "$log" >&2; then
  echo "a warning in our sources (above) is an error" >&2
  exit 1
fi
