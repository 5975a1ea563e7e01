#!/usr/bin/env bash
# run_catch.sh cpu|gpu [PROGRAM]: runs the cases of a Catch2 program that are not, or are, tagged [gpu].
# PACER_TEST_FILTER limits them to those whose name contains it, PACER_TEST_EXCEPT (one name a line) leaves some out, and
# PACER_TEST_SEED shuffles them. No PROGRAM: this build has none, as it is without CUDA.
set -euo pipefail
kind=$1 program=${2:-}
quoted() { sed 's/[][,"\\]/\\&/g' <<<"$1"; }
name=$(quoted "${PACER_TEST_FILTER:-}")
name=${name:+"\"*$name*\""}

if [[ $kind == cpu ]]; then
  spec="${name}~[gpu]"
else
  spec="${name}[gpu]"
  if [[ -z $program ]]; then
    echo "PACER_SKIPPED: this build has no CUDA"
    exit 0
  fi
  if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null && ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
    echo "PACER_SKIPPED: this machine has no NVIDIA GPU"
    exit 0
  fi
fi

# Nothing matches a filter: that is a failure for Catch2 3 and none for Catch2 2.
if [[ -n $name ]] && "$program" --list-tests "$spec" | grep -qE '^0 (matching )?test cases'; then
  echo "No test case matches."
  exit 0
fi
while IFS= read -r case; do
  [[ -z $case ]] || spec+="~\"$(quoted "$case")\""
done <<<"${PACER_TEST_EXCEPT:-}"
order=()
[[ -z ${PACER_TEST_SEED:-} ]] || order=(--order rand --rng-seed "$PACER_TEST_SEED")
exec "$program" "$spec" --min-duration 5 "${order[@]}"
