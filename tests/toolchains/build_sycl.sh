#!/usr/bin/env bash
# build_sycl.sh LIBS OUT : OUT/libdflash-sycl.so, the SYCL backend with our kernels, for the CPU device of OpenCL.
# LIBS is the folder of libdflash-base.so. A second run compiles what has changed. Never ship the result: it holds only
# the parts of upstream's backend that our tests reach, and it takes a CPU for a GPU.
source "$(dirname "$0")/common.sh"

[[ $# == 2 && -f $1/libdflash-base.so ]] || die "usage: build_sycl.sh LIBS OUT, LIBS with libdflash-base.so"
libs=$(realpath "$1") out=$(realpath -m "$2")
bash "$HERE/sycl_sdk.sh"
sdk=$TOOLCHAINS/sycl
python3 "$ROOT/vendor/materialise.py"

# What the dispatch file needs to start a device and move memory, and one op of upstream's to compare with.
files=(ggml-sycl common sycl_hw mem memtrace fusion fattn-buffers topk-moe gated_delta_net)
for source in "$GGML"/src/ggml-sycl/dflash/*.cpp; do
  [[ -f $source ]] || die "no SYCL kernels of ours in $GGML/src/ggml-sycl/dflash"
  files+=("dflash/$(basename "$source" .cpp)")
done
mkdir -p "$out"
cd "$out"
make -k -j "$JOBS" --no-print-directory -f "$HERE/sycl.mk" SDK="$sdk" GGML="$GGML" HERE="$HERE" FILES="${files[*]}" all
clang++-19 -std=c++17 -O2 -fPIC -c "$HERE/sycl_cpu_device.cpp" -o cpu_device.o

# Link once to see what the left-out files would have defined, then again with functions in their place that say so.
names=("${files[@]/#/obj/}")
objects=("${names[@]/%/.host.o}" "${names[@]/%/.reg.o}" cpu_device.o)
needed=(-L"$sdk/lib" -lsycl -L"$libs" -ldflash-base "-Wl,-rpath,$libs:$sdk/lib")
g++ -shared -o incomplete.so "${objects[@]}" "${needed[@]}"
nm -D --undefined-only incomplete.so | awk '$1 == "U" && $2 !~ /@/ { print $2 }' | sort -u >undefined
nm -D --defined-only "$libs/libdflash-base.so" "$sdk/lib/libsycl.so" |
  awk 'NF == 3 { sub(/@.*/, "", $3); print $3 }' | sort -u >provided
comm -23 undefined provided >left_out
if grep -q dflash left_out; then
  die "functions of ours are declared and not defined: $(grep dflash left_out | c++filt | paste -sd ' ')"
fi
{
  echo '#include "sycl_left_out.h"'
  awk '{ printf "LEFT_OUT(left_out_%d, \"%s\")\n", NR, $0 }' left_out
} >left_out.cpp
g++ -std=c++17 -fPIC -fvisibility=hidden -I"$HERE" -c left_out.cpp -o left_out.o
g++ -shared -o libdflash-sycl.so "${objects[@]}" left_out.o "${needed[@]}" -Wl,-z,defs
rm incomplete.so
echo "SYCL: $(wc -l <left_out) functions of upstream left out, $(stat -c %s libdflash-sycl.so) bytes"
