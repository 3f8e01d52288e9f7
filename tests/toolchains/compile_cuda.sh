#!/usr/bin/env bash
# compile_cuda.sh [OUT] : our CUDA kernels for three architectures, those of Hopper's own for it, and upstream's dispatch
# for one. Nothing runs.
# Flags as in vendor/dflash_sources.cmake. Fails on a warning in our files, and on a spill that cuda_spills.txt lacks.
source "$(dirname "$0")/common.sh"

out=$(realpath -m "${1:-$ROOT/build/toolchains/cuda}")
bash "$HERE/cuda_sdk.sh"
python3 "$ROOT/vendor/materialise.py"
mkdir -p "$out"
export OUT=$out NVCC=$TOOLCHAINS/cuda/nvcc

# name_of SOURCE : what its object and its log are called
name_of() {
  local name=${1##*/dflash/}
  name=${name//\//_}
  basename "$name" .cu
}
export -f name_of

# compile SOURCE ARCH... : OUT/NAME.o and OUT/NAME.log with the resources of each kernel
compile() {
  local source=$1 name arch flags
  shift
  name=$(name_of "$source")
  flags=(-std=c++17 -O3 -DNDEBUG -use_fast_math -extended-lambda -compress-mode=size -Xcompiler=-fPIC --threads "$JOBS"
    -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_BACKEND_BUILD -DGGML_BACKEND_DL -DGGML_BACKEND_SHARED -DGGML_SHARED
    -DGGML_SCHED_MAX_COPIES=4 -DGGML_CUDA_USE_GRAPHS -DGGML_CUDA_NO_VMM -I"$GGML/src" -I"$GGML/include")
  for arch; do
    flags+=(-gencode "arch=compute_$arch,code=sm_$arch")
  done
  if [[ $source == */dflash/* ]]; then
    flags+=(-DDFLASH_SM90A -ftz=false -prec-div=true -prec-sqrt=true -fmad=false
      -Xcompiler=-Wall -Xcompiler=-Wextra -Xcompiler=-Wno-unused-function -Xptxas=-v)
  else
    flags+=(-w)
  fi
  bash "$HERE/strict.sh" "$OUT/$name.log" "$NVCC" "${flags[@]}" -c "$source" -o "$OUT/$name.o" || return 1
}
export -f compile

# logs_of SOURCE... : the logs that compile wrote, into `logs`
logs_of() {
  logs=()
  for source; do
    logs+=("$out/$(name_of "$source").log")
  done
}

sources=("$GGML"/src/ggml-cuda/dflash/*.cu)
hopper=("$GGML"/src/ggml-cuda/dflash/sm90a/*.cu)
[[ -f ${sources[0]} && -f ${hopper[0]} ]] || die "no CUDA kernels of ours in $GGML/src/ggml-cuda/dflash"
printf '%s\0' "${sources[@]}" | xargs -0 -P "$JOBS" -I{} bash -c 'compile "$@"' _ {} 75 90 120
printf '%s\0' "${hopper[@]}" | xargs -0 -P "$JOBS" -I{} bash -c 'compile "$@"' _ {} 90a
compile "$GGML/src/ggml-cuda/ggml-cuda.cu" 90
logs_of "${sources[@]}"
python3 "$HERE/resources.py" --spills "$HERE/cuda_spills.txt" --at sm_90 --no-kernels dflash "${logs[@]}"
logs_of "${hopper[@]}"
python3 "$HERE/resources.py" --spills "$HERE/cuda_spills.txt" --at sm_90a --no-kernels sm90a_mul_mat "${logs[@]}"
