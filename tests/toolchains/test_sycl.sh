#!/usr/bin/env bash
# test_sycl.sh TEST_DFLASH_OPS MODULE : the native tests on the CPU device of OpenCL, with the module of build_sycl.sh.
source "$(dirname "$0")/common.sh"

[[ $# == 2 && -x $1 && -f $2 ]] || die "usage: test_sycl.sh TEST_DFLASH_OPS MODULE"
log=$2.tests.log
# order_products multiplies with upstream's kernels, which need oneMKL and are not in the module.
if ! bash "$HERE/run_sycl.sh" "$1" --without order_products "$2" >"$log" 2>"$log.stderr"; then
  cat "$log"
  tail -n 20 "$log.stderr" >&2
  die "the native tests fail on the SYCL CPU device"
fi
grep -vE '^ +walk ' "$log"
grep -qE '^SYCL0 +gdn +[1-9][0-9]* checks' "$log" || die "no case ran on the SYCL device"
