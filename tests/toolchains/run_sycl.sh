#!/usr/bin/env bash
# run_sycl.sh PROGRAM [ARGUMENT...] : with SYCL's run time and the CPU device of OpenCL as its only device.
source "$(dirname "$0")/common.sh"

sdk=$TOOLCHAINS/sycl
[[ -f $sdk/stamp ]] || die "no SYCL run time in $sdk: run sycl_sdk.sh first"
export LD_LIBRARY_PATH=$sdk/lib OCL_ICD_FILENAMES=$sdk/lib/libintelocl.so ONEAPI_DEVICE_SELECTOR=opencl:cpu
exec "$@"
