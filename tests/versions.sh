#!/usr/bin/env bash
# Builds and tests pacer with other versions of LibTorch, each in a folder of its own below build/versions. At the end it
# prints a line for each version, for the table in docs/platforms.md, and "N passed, N failed, N skipped" of all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'END'
Usage: tests/versions.sh [option...] VERSION...
  VERSION         for example 2.12.1, or oldest or newest: the ends of the range that pacer is made for
  --differences   only the tests of what differs between versions, without CUDA: minutes instead of half an hour each
  --remove        remove each version's folder once it was tested, which has gigabytes
  --help          this text
Environment: PACER_CUDA and PACER_DEPS, as of tests/run.sh
END
}

wrong() {
  echo "tests/versions.sh: $1; see tests/versions.sh --help" >&2
  exit 2
}

differences=OFF remove=0 versions=()
while (($#)); do
  case $1 in
    --differences) differences=ON ;;
    --remove) remove=1 ;;
    --help) usage && exit ;;
    -*) wrong "unknown option $1" ;;
    oldest | newest) versions+=("$(sed -n "s/^set(PACER_LIBTORCH_${1^^} \([0-9.]*\))$/\1/p" cmake/LibTorch.cmake)") ;;
    *) versions+=("$1") ;;
  esac
  shift
done
((${#versions[@]})) || wrong "name at least one version"

# Sets up, builds and tests the version in the folder; writes what ctest found to results.xml there.
try() {
  local version=$1 folder=$2 cuda=${PACER_CUDA:-AUTO} only=() prefix
  PACER_LIBTORCH=$version PACER_VENV=$folder/venv cmake/bootstrap.sh --with-readers || return
  prefix=$(echo "$folder"/venv/lib/python3*/site-packages/torch)
  [[ $differences == OFF ]] || cuda=OFF only=(-DPACER_EXAMPLES=OFF -DPACER_BENCHMARKS=OFF)
  # The library is optimized, unlike in the preset: some of GCC's warnings come of what it looks at to optimize.
  cmake --preset ci -B "$folder/build" -DTorch_DIR="$prefix/share/cmake/Torch" -DPACER_CUDA="$cuda" \
    -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DPACER_PROGRAM_OPTIMIZATION=-O0 \
    -DPACER_DEPS="${PACER_DEPS:-}" -DPACER_TESTS_OF_LIBTORCH=$differences "${only[@]}" || return
  cmake --build "$folder/build" --parallel "$(nproc)" || return
  OMP_WAIT_POLICY=passive ctest --test-dir "$folder/build" --output-on-failure --parallel "$(($(nproc) + 1))" --output-junit "$folder/results.xml" \
    --test-output-size-passed 10000000 --test-output-size-failed 10000000 || true
  [[ -e $folder/results.xml ]]
}

passed=0 failed=0 skipped=0 rows=()
for version in "${versions[@]}"; do
  printf '\n== LibTorch %s\n' "$version"
  started=$SECONDS folder=$PWD/build/versions/$version counts="0 passed, 1 failed, 0 skipped" built=no
  mkdir -p "$folder"
  rm -f "$folder/results.xml"
  if try "$version" "$folder"; then
    built=yes
    python3 tests/meta/summary.py tests "$folder/results.xml" | tee "$folder/summary" || true
    counts=$(tail -n 1 "$folder/summary")
  fi
  rows+=("| $version | $built | $counts | $(((SECONDS - started) / 60)) | $(date +%F) |")
  [[ $counts =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]] ||
    BASH_REMATCH=('' 0 1 0)  # nothing was counted
  ((passed += BASH_REMATCH[1], failed += BASH_REMATCH[2], skipped += BASH_REMATCH[3], 1))
  ((!remove)) || rm -rf "$folder"
done

printf '\n| LibTorch | compiled | tests | minutes | date |\n| --- | --- | --- | --- | --- |\n'
printf '%s\n' "${rows[@]}"
echo "$passed passed, $failed failed, $skipped skipped"
((failed == 0))
