#!/usr/bin/env bash
# Sets up, builds the convergence study and runs it: the same small model, trained by LibTorch's optimizer and with
# pacer's parts, on all GPUs, or on a CPU with two cores in two processes. All arguments go to it (try --quick for a first
# look, --processes 1 for a single process, or --help). Results are written to run/ in the project. --help and a mistyped
# option are answered before anything is set up: exit codes 0 and 2. Without a GPU it builds no CUDA (cmake/cuda_default.sh).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
program=$root/build/release/examples/convergence

# The study's options, one a line, from the table it is built from.
known_options() {
  tr '\n' ' ' <"$root/examples/convergence/option_table.cpp" |
    grep -oE '\{"[a-z-]+", +[a-z:_]+\(' | grep -oE '"[a-z-]+"' | tr -d '"'
  printf '%s\n' config help help-all list print-config completion
}

print_help() {
  cat <<'TEXT'
examples/run.sh [OPTIONS]: sets up what is missing, builds the convergence study and runs it

  examples/run.sh --quick                  a first look: set-up and build once, then two minutes on a CPU
  examples/run.sh --quick --data book.txt  on your text
  examples/run.sh                          the study: on two cores five arms of about a minute each
  PACER_CUDA=ON examples/run.sh --quick    builds CUDA also where there is no GPU; OFF: never
TEXT
  if [[ -x $program ]]; then
    printf '\nThe options are those of the study:\n\n'
    "$program" "$1"
  else
    printf '\nThe options are those of the study, which explains them once it is built:\n\n'
    known_options | sed 's/^/  --/'
  fi
}

# The option that differs from $1 in the fewest letters; nothing where even that one is too far to be meant.
nearest_option() {
  known_options | awk -v typed="$1" '
    function least(a, b) { return a < b ? a : b }
    function distance(from, to,    i, j, n, m, cost) {
      n = length(from); m = length(to)
      for (i = 0; i <= n; ++i) cost[i, 0] = i
      for (j = 0; j <= m; ++j) cost[0, j] = j
      for (i = 1; i <= n; ++i)
        for (j = 1; j <= m; ++j)
          cost[i, j] = least(cost[i - 1, j - 1] + (substr(from, i, 1) != substr(to, j, 1)),
                             1 + least(cost[i - 1, j], cost[i, j - 1]))
      return cost[n, m]
    }
    { far = distance(typed, $0); if (NR == 1 || far < smallest) { smallest = far; nearest = $0 } }
    END { half = int(least(length(typed), length(nearest)) / 2); if (smallest <= (half > 2 ? half : 2)) print nearest }'
}

for argument in "$@"; do
  case $argument in
  --help | --help-all | -h)
    print_help "$argument"
    exit 0
    ;;
  --*)
    name=${argument#--}
    name=${name%%=*}
    if ! known_options | grep -xF -- "$name" >/dev/null; then
      nearest=$(nearest_option "$name")
      advice="--help lists all options"
      [[ -z $nearest ]] || advice="did you mean '--$nearest'?"
      echo "examples/run.sh: unknown option '--$name'; $advice" >&2
      exit 2
    fi
    ;;
  esac
done

"$root/cmake/build.sh" release convergence
printf '\n== convergence (--quick: about two minutes on a CPU; else about a minute for each arm)\n'
# Files in the arguments are relative to where the caller stands.
[[ $PWD -ef $root ]] || export PACER_OUTPUT=${PACER_OUTPUT:-$root/run/convergence}
# As many processes as this machine is good for, unless a settings file may say otherwise.
[[ " $*" == *" --config"* || -n ${PACER_CONFIG:-} ]] || export PACER_PROCESSES=${PACER_PROCESSES:-0}
exec "$program" "$@"
