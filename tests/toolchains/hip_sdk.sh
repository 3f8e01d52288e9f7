#!/usr/bin/env bash
# HIP 6.4 headers and device libraries at $TOOLCHAINS/hip beside Debian 12's clang-19. No AMD run time, no GPU.
source "$(dirname "$0")/common.sh"

apt_install clang-19 lld-19 clang-tools-19 g++
begin_sdk hip

# Debian 12's own HIP is older than ggml's minimum, 6.1. forky moves on; packages are asked for by name.
unpack_debs forky "$SDK/root" libamdhip64-dev libhipblas-dev libhipblas-common-dev librocblas-dev
# The device libraries are LLVM bitcode: clang-19 reads LLVM 17's, and not those of forky's LLVM 21.
unpack_debs trixie "$SDK/root" rocm-device-libs-17
mkdir "$SDK/bitcode"
cp "$SDK"/root/usr/lib/llvm-17/lib/clang/17/amdgcn/bitcode/*.bc "$SDK/bitcode/"

# GPUs that are newer than that set: one constant each.
for isa in 1150:11500 1151:11501 1200:12000 1201:12001; do
  file=$SDK/bitcode/oclc_isa_version_${isa%:*}.bc
  [[ -f $file ]] ||
    echo "const __attribute__((address_space(4))) int __oclc_ISA_version = ${isa#*:};" |
    clang-19 -x c -target amdgcn-amd-amdhsa -nogpulib -O2 -emit-llvm -c - -o "$file"
done
end_sdk "$(clang-19 --version | head -n 1), $(paste -sd ' ' "$SDK/versions")"
