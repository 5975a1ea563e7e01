#!/usr/bin/env bash
# Sets up, builds and runs every test that this machine can run. The last line is "N passed, N failed, N skipped".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'END'
Usage: tests/run.sh [option...]
  --filter TEXT   only test cases whose name contains TEXT (and scripts whose name matches it)
  --minutes N     once N minutes are over, leave out what is labelled later (examples in several processes, launchers,
                  consumers, benchmarks), which is behind everything else then; the last lines say what was left out
  --long          run the randomized tests for longer (sets PACER_TEST_LONG=1)
  --preset NAME   release (default), debug, ci, asan or tsan; the build is in build/NAME
  --help          this text
Environment:
  PACER_CUDA=AUTO|ON|OFF   whether to build the CUDA parts (AUTO: where there is a toolkit, with or without a GPU)
  PACER_DEPS=FOLDER        unpacked Debian packages with headers that the system lacks
  Torch_DIR=FOLDER         use this LibTorch
END
}

wrong() {
  echo "tests/run.sh: $1; see tests/run.sh --help" >&2
  exit 2
}

filter='' preset=release minutes=''
while (($#)); do
  case $1 in
    --filter | --preset | --minutes) (($# > 1)) || wrong "$1 needs a value" ;;&
    --filter) filter=$2 && shift 2 ;;
    --preset) preset=$2 && shift 2 ;;
    --minutes) minutes=$2 && shift 2 ;;
    --long) export PACER_TEST_LONG=1 && shift ;;
    --help) usage && exit ;;
    *) wrong "unknown option $1" ;;
  esac
done
case $preset in
  release | debug | ci | asan | tsan) ;;
  *) wrong "unknown preset $preset" ;;
esac
[[ $minutes =~ ^[0-9]*$ ]] || wrong "--minutes takes a whole number, not $minutes"

# Several tests share the cores, which threads that wait in a loop for each other would take from those at work.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

started=$SECONDS
cmake/build.sh "$preset" all || {
  status=$?
  echo "The build failed, so no test ran." >&2
  echo "0 passed, 1 failed, 0 skipped"
  exit $status
}

printf '\n== test\n'
results=("$PWD/build/$preset/results.xml" "$PWD/build/$preset/results_later.xml")
rm -f "${results[@]}"
select=()
if [[ -n $filter ]]; then
  export PACER_TEST_FILTER=$filter
  select=(--tests-regex "^cases\.|$filter")
fi
status=0

# Runs what the options select, and has RESULTS written.
run_tests() {
  local results=$1
  shift
  # One more at a time than there are cores: ranks wait for each other, and often for a deadline.
  ctest --test-dir "build/$preset" --output-on-failure --parallel "$(($(nproc) + 1))" "${select[@]}" "$@" \
    --output-junit "$results" --test-output-size-passed 10000000 --test-output-size-failed 10000000 || status=$?
}

left_out=''
if [[ -z $minutes ]]; then
  run_tests "${results[0]}"
else
  run_tests "${results[0]}" --label-exclude '^later$'
  if ((SECONDS - started < 60 * minutes)); then
    run_tests "${results[1]}" --label-regex '^later$'
  else
    left_out=$(ctest --test-dir "build/$preset" --show-only "${select[@]}" --label-regex '^later$' |
      sed -n 's/^ *Test *#[0-9]*: //p')
  fi
fi
echo
echo "$((SECONDS - started)) s in all"
if [[ -n $left_out ]]; then
  printf 'Left out, as %s minutes were over; tests/run.sh --preset %s --filter NAME runs one of them:\n' "$minutes" "$preset"
  sed 's/^/  /' <<<"$left_out"
fi
python3 tests/meta/summary.py tests "${results[@]}" || status=1
exit "$status"
