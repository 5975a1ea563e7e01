#!/usr/bin/env bash
# coverage.sh [REGEX]: builds everything with counters, runs the unit and property cases and the runs with several
# processes (or what of them matches REGEX), and prints the lines and branches that ran, by folder. The build is in
# build/coverage; results add up over calls, so that parts can be run one after the other: --fresh forgets former ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=build/coverage
fresh='' select='^cases\.(unit|property)$|^distributed\.'
for word in "$@"; do
  case $word in
    --fresh) fresh=yes ;;
    -*) echo "coverage.sh: unknown option $word; it knows --fresh" >&2 && exit 2 ;;
    *) select=$word ;;
  esac
done

cmake/bootstrap.sh
cmake --preset coverage -DPACER_DEPS="${PACER_DEPS:-}"
cmake --build "$build" --parallel "${PACER_JOBS:-$(nproc)}" \
  --target pacer-unit-tests pacer-property-tests pacer-distributed-worker
if [[ ! -x $build/gcovr/bin/gcovr ]]; then
  python3 -m venv "$build/gcovr"
  "$build/gcovr/bin/pip" install --quiet 'gcovr>=8.3,<9'
fi

[[ -z $fresh ]] || find "$build" -name '*.gcda' -delete
failed=0
ctest --test-dir "$build" --no-tests=error --output-on-failure --parallel "$(nproc)" --tests-regex "$select" || failed=1
# Threads count without locks, so that a count may be off, but not whether it is 0.
"$build/gcovr/bin/gcovr" --root . "$build" --exclude-throw-branches --exclude-unreachable-branches \
  --gcov-ignore-parse-errors=negative_hits.warn_once_per_file --gcov-ignore-parse-errors=suspicious_hits.warn_once_per_file \
  --filter '(core|files|kernels|device|collectives|compression|modules|optimizers|hooks|schedulers|metrics|parallel|checkpoints|session)/' \
  --filter "$build/include/pacer/" --json "$build/coverage.json"
python3 tests/meta/coverage.py "$build/coverage.json" "$build/uncovered.txt" || failed=1
exit $failed
