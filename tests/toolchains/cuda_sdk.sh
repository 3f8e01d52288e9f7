#!/usr/bin/env bash
# A CUDA compiler with cuBLAS headers at $TOOLCHAINS/cuda/nvcc: the nvcc on PATH if it is new enough, else the one of
# PyPI's wheels.
source "$(dirname "$0")/common.sh"

oldest=12.8 # the first that knows sm_120
apt_install g++
found=$(command -v nvcc || true)
version=$([[ -z $found ]] || "$found" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
if [[ -z $version || $(printf '%s\n' "$oldest" "$version" | sort -V | head -n 1) != "$oldest" ]]; then
  found="" version=13.0
fi
case $version in
12.*) cublas="nvidia-cublas-cu12==12.8.*" headers=nvidia/cublas/include ;;
13.*) cublas="nvidia-cublas==13.0.*" headers=nvidia/cu13/include ;;
*) die "nvcc $version: no cuBLAS headers are known for it; put an nvcc 12.8 to 13.x first on PATH, or none" ;;
esac
begin_sdk cuda "$found" "$version"

pip_install --no-deps "$cublas"
if [[ -z $found ]]; then
  pip_install --no-deps "nvidia-cuda-nvcc==13.0.*" "nvidia-nvvm==13.0.*" "nvidia-cuda-crt==13.0.*" \
    "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cccl==13.0.*"
fi
packages=$("$SDK/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[[ -f $packages/$headers/cublas_v2.h ]] || die "$cublas has no $headers/cublas_v2.h"
rm -f "$packages/$headers"/../lib/libcublas*.so* # 0.9 GB that a compiler does not read
compiler=${found:-$packages/nvidia/cu13/bin/nvcc}
printf '#!/bin/sh\nexec "%s" "$@" -isystem "%s"\n' "$compiler" "$packages/$headers" >"$SDK/nvcc"
chmod +x "$SDK/nvcc"
end_sdk "$compiler, $("$SDK/nvcc" --version | grep release), $(installed_wheels '^nvidia')"
