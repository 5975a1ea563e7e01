#!/usr/bin/env bash
# says.sh REGEX PROGRAM [ARGUMENT...]: the program ends well, and what it prints has a match of the extended regular expression.
set -euo pipefail
regex=$1
shift
printed=$("$@" 2>&1) && status=0 || status=$?
printf '%s\n' "$printed"
[[ $status == 0 ]] || { echo "it ended with $status"; exit 1; }
[[ $printed =~ $regex ]] || { echo "nothing there matches $regex"; exit 1; }
