#!/usr/bin/env bash
# build.sh PRESET TARGET: set-up, configure and build, with one line per stage. What tests/run.sh and examples/run.sh share.
# PACER_CUDA and PACER_DEPS are taken from the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
preset=$1 target=$2

stage() { printf '\n== %s\n' "$*"; }

# One compiler needs up to 2 GB for LibTorch's headers.
jobs=$(nproc)
memory=$(awk '/^MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)
((memory >= jobs)) || jobs=$((memory > 1 ? memory : 1))

# Warnings are errors in CI, and with the compiler that CI has; another one may know more warnings.
werror=OFF
[[ ${CI:-} != true && ! $("${CXX:-c++}" -dumpversion 2>/dev/null) =~ ^12 ]] || werror=ON

stage "set-up"
# Tests read with Python what pacer writes.
readers=()
[[ $target != all ]] || readers=(--with-readers)
cmake/bootstrap.sh "${readers[@]}"
stage "configure (preset $preset)"
cmake --preset "$preset" -DPACER_WERROR=$werror -DPACER_CUDA="${PACER_CUDA:-AUTO}" -DPACER_DEPS="${PACER_DEPS:-}"
stage "build ($jobs at a time)"
started=$SECONDS
cmake --build "build/$preset" --target "$target" --parallel "$jobs"
echo "built in $((SECONDS - started)) s"
