#!/usr/bin/env bash
# Builds the fuzz targets with clang, libFuzzer and the sanitizers, and lets them run one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'ENDOFUSAGE'
Usage: tests/fuzz/run.sh [TARGET [SECONDS]]
  TARGET    one of tests/fuzz/targets, or "all" (the default)
  SECONDS   for each target; 60 by default
What a target finds worth keeping is in build/fuzz/corpus/TARGET and is where the next run goes on from. An input
that breaks a promise ends the run, and is left in build/fuzz/TARGET-*.
ENDOFUSAGE
}

target=${1:-all} seconds=${2:-60}
if [[ $target == --help ]]; then
  usage
  exit
fi
names=()
for file in tests/fuzz/targets/*.cpp; do
  name=$(basename "$file" .cpp)
  [[ $name == load_weights || $name == causal_lm_adapter ]] && continue  # they need LibTorch
  if [[ $target == all || $target == "$name" ]]; then names+=("$name"); fi
done
if ((${#names[@]} == 0)); then
  echo "tests/fuzz/run.sh: there is no target $target that runs with libFuzzer; see tests/fuzz/targets" >&2
  exit 2
fi

cmake --preset fuzz >/dev/null
ninja -C build/fuzz "${names[@]/#/fuzz-}"
export ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
for name in "${names[@]}"; do
  program=build/fuzz/tests/fuzz/fuzz-$name corpus=build/fuzz/corpus/$name
  mkdir -p "$corpus"
  "$program" --unpack "tests/fuzz/corpus/$name.txt" "$corpus"
  dictionary=$(sed -n "s/^ *pacer_add_fuzz_target($name [0-9]* \([a-z]*\).*/\1/p" tests/fuzz/CMakeLists.txt)
  printf '\n== %s, %s s\n' "$name" "$seconds"
  "$program" -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=4096 -print_final_stats=1 \
    -verbosity=1 -dict="tests/fuzz/dictionaries/$dictionary.dict" -artifact_prefix="build/fuzz/$name-" "$corpus"
done
