#!/usr/bin/env bash
# Sets up, builds the examples and runs the convergence study: the same small model, trained by LibTorch's optimizer and with
# pacer's parts, on all GPUs, or on a CPU with two cores in two processes. All arguments go to it (try --quick for a first
# look, --processes 1 for a single process, or --help). Results are written to run/ in the project.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/cmake/build.sh" release examples
printf '\n== convergence\n'
# Files in the arguments are relative to where the caller stands.
[[ $PWD -ef $root ]] || export PACER_OUTPUT=${PACER_OUTPUT:-$root/run/convergence}
# As many processes as this machine is good for, unless a settings file may say otherwise.
[[ " $*" == *" --config"* || -n ${PACER_CONFIG:-} ]] || export PACER_PROCESSES=${PACER_PROCESSES:-0}
exec "$root/build/release/examples/convergence" "$@"
