#!/bin/sh
# 1-bit Adam beside AdamW on the CPU, and what its choices are worth: when to freeze, clipping, scales, the floor
# under the variance, and two ways of compressing that do not work.
#
#   examples/convergence/onebit_study.sh TEXT [TOKENS] [FOLDER]
#
# TEXT: a file or folder of text. TOKENS: budget of each run (400k, for which two cores need most of an hour). Run
# again after an interruption: finished runs are kept. Prints one table after another; they are also in FOLDER
# (run/onebit-study). PACER_JOBS=N trains N tables' runs at a time (1).
set -eu
if [ $# -lt 1 ]; then
  echo "onebit_study.sh: name a file or folder of text to train on" >&2
  exit 2
fi
text=$1 tokens=${2:-400k} folder=${3:-run/onebit-study}
program=${PACER_CONVERGENCE:-build/release/examples/convergence}
[ -x "$program" ] || { echo "onebit_study.sh: $program is not there; build it with ./cmake/build.sh release examples" >&2; exit 2; }
mkdir -p "$folder"

# table NAME OPTIONS...
table() {
  name=$1
  shift
  "$program" --data "$text" --tokens "$tokens" --device cpu --threads 1 --processes 4 --resume --output "$folder/$name" "$@" \
    > "$folder/$name.txt" 2> "$folder/$name.log" || { tail -3 "$folder/$name.log" >&2; return 1; }
  echo "== $name: $*"
  cat "$folder/$name.txt"
}

running=0
start() {
  table "$@" &
  running=$((running + 1))
  [ "$running" -lt "${PACER_JOBS:-1}" ] || { wait; running=0; }
}

start arms --arms fused-adamw,onebit-adam,onebit-adam-refreshed,frozen-uncompressed --seeds 1,2,3
for share in 0.05 0.10 0.20 0.35; do
  start "freeze-$share" --arms fused-adamw,onebit-adam --onebit-freeze "$share"
done
start no-clip --arms fused-adamw,onebit-adam --clip 0
start ranks-16 --arms fused-adamw,onebit-adam --processes 16 --batch 16
start ranks-16-no-clip --arms fused-adamw,onebit-adam --processes 16 --batch 16 --clip 0
start scales --arms fused-adamw,onebit-adam,onebit-adam-blocks
start teaching --arms fused-adamw,naive,no-feedback
start guard --arms curriculum,early-freeze,early-freeze-unguarded
wait
