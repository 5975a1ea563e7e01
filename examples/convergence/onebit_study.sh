#!/bin/sh
# 1-bit Adam beside AdamW on the CPU, and what its choices are worth: when to freeze, clipping, scales, the floor
# under the variance, and two ways of compressing that do not work.
#
#   examples/convergence/onebit_study.sh TEXT [TOKENS] [FOLDER]
#
# TEXT: a file or folder of text. TOKENS: budget of each run (400k, for which two cores need most of an hour). Run
# again after an interruption: finished runs are kept. Prints one table after another; they are also in FOLDER
# (run/onebit-study). JOBS=N trains N tables' runs at a time (1).
set -eu
if [ $# -lt 1 ]; then
  echo "onebit_study.sh: name a file or folder of text to train on" >&2
  exit 2
fi
text=$1 tokens=${2:-400k} folder=${3:-run/onebit-study}
program=${CONVERGENCE:-build/release/examples/convergence}
[ -x "$program" ] || { echo "onebit_study.sh: $program is not there; build it with ./cmake/build.sh release examples" >&2; exit 2; }
mkdir -p "$folder"
rm -f "$folder/failed"

# table RANKS NAME OPTIONS...
table() {
  ranks=$1 name=$2
  shift 2
  "$program" --data "$text" --tokens "$tokens" --device cpu --threads 1 --processes "$ranks" --resume --output "$folder/$name" "$@" \
    > "$folder/$name.txt" 2> "$folder/$name.log" || { tail -3 "$folder/$name.log" >&2; touch "$folder/failed"; return; }
  echo "== $name: $*"
  sed -n '/^arm /,$p' "$folder/$name.txt"
}

running=0
start() {
  table "$@" &
  running=$((running + 1))
  [ "$running" -lt "${JOBS:-1}" ] || { wait; running=0; }
}

start 4 arms --arms fused-adamw,onebit-adam,onebit-adam-refreshed,frozen-uncompressed --seeds 1,2,3
# The learning rate rises for 5 % of the steps, and nothing may freeze before.
for share in 0.06 0.10 0.20 0.35; do
  start 4 "freeze-$share" --arms fused-adamw,onebit-adam --onebit-freeze "$share"
done
start 4 no-clip --arms fused-adamw,onebit-adam --clip 0
start 16 ranks-16 --arms fused-adamw,onebit-adam --batch 16
start 16 ranks-16-no-clip --arms fused-adamw,onebit-adam --batch 16 --clip 0
start 4 scales --arms fused-adamw,onebit-adam,onebit-adam-blocks
start 4 teaching --arms fused-adamw,naive,no-feedback
# Shorter sequences make more steps: this is after a sixth of them, when the curriculum has half of its way before it.
start 4 guard --arms curriculum,early-freeze,early-freeze-unguarded --onebit-freeze 0.6
wait
[ ! -e "$folder/failed" ]
