#!/usr/bin/env bash
# compile_cuda.sh [OUT] : our CUDA kernels for three architectures and upstream's dispatch for one. Nothing runs.
# Flags as in vendor/dflash_sources.cmake. Fails on a warning in our files, and on a spill that cuda_spills.txt lacks.
source "$(dirname "$0")/common.sh"

out=$(realpath -m "${1:-$ROOT/build/toolchains/cuda}")
bash "$HERE/cuda_sdk.sh"
python3 "$ROOT/vendor/materialise.py"
mkdir -p "$out"
export OUT=$out NVCC=$TOOLCHAINS/cuda/nvcc

# compile SOURCE ARCH... : OUT/NAME.o and OUT/NAME.log with the resources of each kernel
compile() {
  local source=$1 name arch flags
  shift
  name=$(basename "$source" .cu)
  flags=(-std=c++17 -O3 -DNDEBUG -use_fast_math -extended-lambda -compress-mode=size -Xcompiler=-fPIC --threads "$JOBS"
    -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_BACKEND_BUILD -DGGML_BACKEND_DL -DGGML_BACKEND_SHARED -DGGML_SHARED
    -DGGML_SCHED_MAX_COPIES=4 -DGGML_CUDA_USE_GRAPHS -DGGML_CUDA_NO_VMM -I"$GGML/src" -I"$GGML/include")
  for arch; do
    flags+=(-gencode "arch=compute_$arch,code=sm_$arch")
  done
  if [[ $source == */dflash/* ]]; then
    flags+=(-ftz=false -prec-div=true -prec-sqrt=true -fmad=false
      -Xcompiler=-Wall -Xcompiler=-Wextra -Xcompiler=-Wno-unused-function -Xptxas=-v)
  else
    flags+=(-w)
  fi
  bash "$HERE/strict.sh" "$OUT/$name.log" "$NVCC" "${flags[@]}" -c "$source" -o "$OUT/$name.o" || return 1
}
export -f compile

sources=("$GGML"/src/ggml-cuda/dflash/*.cu)
[[ -f ${sources[0]} ]] || die "no CUDA kernels of ours in $GGML/src/ggml-cuda/dflash"
printf '%s\0' "${sources[@]}" | xargs -0 -P "$JOBS" -I{} bash -c 'compile "$@"' _ {} 75 90 120
compile "$GGML/src/ggml-cuda/ggml-cuda.cu" 90
logs=("${sources[@]##*/}")
logs=("${logs[@]/#/$out/}")
python3 "$HERE/resources.py" --spills "$HERE/cuda_spills.txt" --at sm_90 --no-kernels dflash "${logs[@]/%.cu/.log}"
