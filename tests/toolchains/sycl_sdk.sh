#!/usr/bin/env bash
# Intel's SYCL front end, run time, OpenCL CPU device and headers from PyPI, the host compiler from Debian.
source "$(dirname "$0")/common.sh"

release=2026.2.0 # syclc.cpp and sycl_register.h hold for this release only
apt_install clang-19 g++ make
begin_sdk sycl "$release"

pip_install "intel-sycl-rt==$release" "intel-opencl-rt==$release"
pip_install --no-deps "onemkl-sycl-include==$release" "mkl-include==$release"
g++ -std=c++17 -O1 -Wall -Wextra -Werror "$HERE/syclc.cpp" -o "$SDK/bin/syclc" -ldl
end_sdk "$(installed_wheels '^(intel|onemkl|mkl|tbb)')"
