#!/usr/bin/env bash
# Completion in bash as it is used: the script is sourced, and its function asked with the words of a line.
#
# completion.sh PROGRAM...: pacer-pipeline, then convergence.
set -euo pipefail
pipeline=$1 study=$2
# shellcheck disable=SC1090
source <("$pipeline" --completion bash)
# shellcheck disable=SC1090
source <("$study" --completion bash)

# completes EXPECTED WORD...: what is proposed for the last word, in one line.
completes() {
  local expected=$1 function
  shift
  function=$(complete -p "$1" | grep -o -- '-F [^ ]*')
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  # It fails where there is nothing to propose.
  "${function#-F }" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" || true
  if [[ "${COMPREPLY[*]-}" != "$expected" ]]; then
    echo "'$*' is completed to '${COMPREPLY[*]-}', not to '$expected'" >&2
    exit 1
  fi
}

completes "--schedule" pacer-pipeline --sch
completes "--help --help-all" pacer-pipeline --stages 4 --h
completes "gpipe 1f1b interleaved zero-bubble" pacer-pipeline --schedule ""
completes "zero-bubble" pacer-pipeline --schedule z
completes "interleaved" pacer-pipeline --schedule = i
completes "gpipe 1f1b interleaved zero-bubble" pacer-pipeline --schedule =
completes "" pacer-pipeline --stages ""
completes "tiny" convergence --preset t
completes "--tokens" convergence --quick --tok
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
touch "$folder/a run.ini"
completes "$folder/a run.ini" pacer-pipeline --config "$folder/a"
echo "bash completes the options and values of $(basename "$pipeline") and $(basename "$study")"
