#!/usr/bin/env bash
# cuda_default.sh PRESET TARGET: prints the PACER_CUDA (AUTO, ON or OFF) that cmake/build.sh configures with. What the
# environment says goes first. Tests compile the CUDA kernels wherever there is a toolkit, because that they compile is one
# of the tests. A single program is built for the machine it will run on: without a GPU it needs no kernels, which would
# take longer to compile than all the rest, and no LibTorch for CUDA; a build that has them keeps them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=$1 target=$2
source cmake/has_gpu.sh

if [[ -n ${PACER_CUDA:-} ]]; then
  echo "$PACER_CUDA"
elif [[ $target == all ]] || has_gpu || grep -qs '^PACER_CUDA:[A-Z]*=\(AUTO\|ON\)' "build/$preset/CMakeCache.txt"; then
  echo AUTO
else
  echo OFF
fi
