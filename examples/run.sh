#!/usr/bin/env bash
# Sets up, builds the examples and runs the convergence study: the same small model, trained by LibTorch's optimizer and by
# pacer's. All arguments go to it (try --help, or --quick for a first look). Results are written to run/.
set -euo pipefail
here=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
cmake/build.sh release examples
convergence=$PWD/build/release/examples/convergence
printf '\n== convergence\n'
cd "$here"  # files named in the arguments are the caller's
export PACER_OUTPUT=${PACER_OUTPUT:-$OLDPWD/run/convergence}
exec "$convergence" "$@"
