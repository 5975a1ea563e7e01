#!/usr/bin/env bash
# build.sh PRESET TARGET: set-up, configure and build, with one line per stage. What tests/run.sh and examples/run.sh share.
# PACER_CUDA and PACER_DEPS are taken from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=$1 target=$2

stage() { printf '\n== %s\n' "$*"; }

# One compiler needs up to 2.5 GB for LibTorch's headers.
jobs=$(nproc)
memory=$(awk '/^MemAvailable/ { print int($2 / 2500000) }' /proc/meminfo)
((memory >= jobs)) || jobs=$((memory > 1 ? memory : 1))

# Warnings are errors in CI, and with the compiler that CI has; another one may know more warnings.
werror=OFF
[[ ${CI:-} != true && ! $("${CXX:-c++}" -dumpversion 2>/dev/null) =~ ^12 ]] || werror=ON

cuda=$(cmake/cuda_default.sh "$preset" "$target")

stage "set-up (nothing to do where everything is there; else some minutes of downloads)"
started=$SECONDS
# Tests read with Python what pacer writes.
readers=()
[[ $target != all ]] || readers=(--with-readers)
PACER_CUDA=$cuda cmake/bootstrap.sh "${readers[@]}"
echo "set up in $((SECONDS - started)) s"

stage "configure (preset $preset; some seconds)"
[[ $cuda != OFF || -n ${PACER_CUDA:-} ]] ||
  echo "There is no GPU here, so CUDA is left out; PACER_CUDA=ON in front of the command builds it, too."
started=$SECONDS
cmake --preset "$preset" -DPACER_WERROR=$werror -DPACER_CUDA="$cuda" -DPACER_DEPS="${PACER_DEPS:-}"
echo "configured in $((SECONDS - started)) s"

# Files take 20 s of one core on average, because most are several of the tree's at once with LibTorch's headers. Under
# its relative name build.ninja is itself something to build, as CMake looks for new files, and a dry run would end there.
dry_run() { ninja -C "build/$preset" -f "$PWD/build/$preset/build.ninja" -n "$target" 2>/dev/null || true; }
files=$(dry_run | grep -c 'Building' || true)
stage "build ($files files, $jobs at a time; about $(((files + 3 * jobs - 1) / (3 * jobs))) min)"
started=$SECONDS
NINJA_STATUS='[%f of %t, %e s] ' cmake --build "build/$preset" --target "$target" --parallel "$jobs"
echo "built in $((SECONDS - started)) s"
