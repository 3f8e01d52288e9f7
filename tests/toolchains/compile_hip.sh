#!/usr/bin/env bash
# compile_hip.sh [OUT] : our CUDA files as HIP for three GPUs (two with 32 threads a warp, one with 64) and upstream's
# dispatch for one. Nothing runs. Flags as in vendor/dflash_sources.cmake. Fails on a warning in our files, and on a
# file whose code object holds no kernel.
source "$(dirname "$0")/common.sh"

out=$(realpath -m "${1:-$ROOT/build/toolchains/hip}")
gpus=(gfx1201 gfx1100 gfx942)
bash "$HERE/hip_sdk.sh"
python3 "$ROOT/vendor/materialise.py"
export OUT=$out SDK=$TOOLCHAINS/hip

# compile SOURCE GPU : OUT/GPU/NAME.o, and NAME.log with the resources of each kernel
compile() {
  local source=$1 gpu=$2 name flags target kernels
  name=$(basename "$source" .cu)
  target=$OUT/$gpu/$name
  mkdir -p "$OUT/$gpu"
  flags=(-x hip "--offload-arch=$gpu" "--rocm-path=$SDK/root/usr" "--rocm-device-lib-path=$SDK/bitcode"
    -std=c++17 -O3 -DNDEBUG -fPIC -D__HIP_PLATFORM_AMD__=1 -D_GNU_SOURCE -D_XOPEN_SOURCE=600
    -DGGML_BACKEND_BUILD -DGGML_BACKEND_DL -DGGML_BACKEND_SHARED -DGGML_SHARED -DGGML_SCHED_MAX_COPIES=4
    -DGGML_USE_HIP -DGGML_HIP_NO_VMM -I"$GGML/include" -I"$GGML/src")
  if [[ $source == */dflash/* ]]; then
    # pass-failed: a launch bound asks for more blocks at a time than one of the GPUs can hold; slower, not wrong
    flags+=(-ffp-contract=off -Wall -Wextra -Wno-unused-function -Wno-pass-failed
      -Rpass-analysis=kernel-resource-usage)
  else
    flags+=(-w)
  fi
  bash "$HERE/strict.sh" "$target.log" clang++-19 "${flags[@]}" -c "$source" -o "$target.o" || return 1

  # The code object, as the run time would find it in the host object; a file without kernels has none.
  kernels=0 size=0
  objcopy -O binary --only-section=.hip_fatbin "$target.o" "$target.fatbin"
  if clang-offload-bundler-19 --unbundle --type=o --input="$target.fatbin" --output="$target.hsaco" \
    --targets="hipv4-amdgcn-amd-amdhsa--$gpu" 2>"$target.unbundle.log"; then
    kernels=$(nm "$target.hsaco" | grep -c ' [RD] .*\.kd$' || true)
    size=$(stat -c %s "$target.hsaco")
  fi
  echo "  $name $gpu: $kernels kernels, $size bytes of device code"
  if [[ $kernels == 0 && $name != dflash ]]; then
    echo "compile_hip.sh: $name: no kernel for $gpu" >&2
    return 1
  fi
}
export -f compile

sources=("$GGML"/src/ggml-cuda/dflash/*.cu)
[[ -f ${sources[0]} ]] || die "no CUDA kernels of ours in $GGML/src/ggml-cuda/dflash"
logs=()
for gpu in "${gpus[@]}"; do
  printf '%s\0' "${sources[@]}" | xargs -0 -P "$JOBS" -I{} bash -c 'compile "$@"' _ {} "$gpu"
  for source in "${sources[@]}"; do
    logs+=("$out/$gpu/$(basename "$source" .cu).log")
  done
done
compile "$GGML/src/ggml-cuda/ggml-cuda.cu" gfx1201
python3 "$HERE/resources.py" --no-kernels dflash "${logs[@]}"
