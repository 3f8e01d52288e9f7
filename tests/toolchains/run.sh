#!/usr/bin/env bash
# The GPU kernels on a machine without a GPU, after tests/run.sh has built the package: CUDA and HIP are compiled, SYCL
# is compiled and run. Prints what each step took.
source "$(dirname "$0")/common.sh"

builds=("$ROOT"/build/cp310-abi3-*)
[[ ${#builds[@]} == 1 && -f ${builds[0]}/lib/libdflash-base.so ]] ||
  die "no build of the package; run tests/run.sh first"
libs=${builds[0]}/lib
ops=${builds[0]}/vendor/tests/test-dflash-ops
[[ -x $ops ]] || die "no $ops; tests/run.sh builds it"

# step TITLE COMMAND...
step() {
  local title=$1 start=$SECONDS
  shift
  echo "== $title"
  "$@"
  echo "== $((SECONDS - start)) s: $title"
}

step "CUDA toolchain" bash "$HERE/cuda_sdk.sh"
step "HIP toolchain" bash "$HERE/hip_sdk.sh"
step "SYCL toolchain" bash "$HERE/sycl_sdk.sh"
step "CUDA: compiled, not run" bash "$HERE/compile_cuda.sh"
step "HIP: compiled, not run" bash "$HERE/compile_hip.sh"
step "SYCL: compiled" bash "$HERE/build_sycl.sh" "$libs" "$ROOT/build/toolchains/sycl"
step "SYCL: run on the SYCL CPU device" bash "$HERE/test_sycl.sh" "$ops" "$ROOT/build/toolchains/sycl/libdflash-sycl.so"
