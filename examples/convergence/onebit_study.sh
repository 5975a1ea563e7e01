#!/bin/sh
# 1-bit Adam beside AdamW on the CPU, and what its choices are worth: when to freeze, clipping, scales, the floor
# under the variance, and two ways of compressing that do not work.
#
#   examples/convergence/onebit_study.sh TEXT [TOKENS] [FOLDER]
#
# TEXT: a file or folder of text. TOKENS: budget of each run (400k, for which two idle cores need at most 40 minutes). Run
# again after an interruption: finished runs are kept. Prints one table after another; they are also in FOLDER
# (run/onebit-study). JOBS=N trains N tables' runs at a time (1). LONG=1500k adds what changes with the length of the
# runs, at that budget (an hour more).
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
# What shares a recipe is one table, so that its baselines are trained once: the three rules of clipping (one factor for all
# ranks; a ratio measured in warm-up; none, below), one scale for all, and what does not work.
start 4 choices --arms fused-adamw,onebit-adam,onebit-adam-clip-ratio,onebit-adam-one-scale,naive,no-feedback
# The fused-adamw and the freeze after 20 % of these are those of `choices`. The learning rate rises for 5 % of the steps, and
# nothing may freeze before.
for share in 0.06 0.10 0.35; do
  start 4 "freeze-$share" --arms onebit-adam --onebit-freeze "$share"
done
start 4 nodes --arms onebit-adam-nodes --ranks-per-node 2
start 4 no-clip --arms fused-adamw,onebit-adam --clip 0
start 16 ranks-16 --arms fused-adamw,onebit-adam,onebit-adam-clip-ratio --batch 16
start 16 ranks-16-no-clip --arms fused-adamw,onebit-adam --batch 16 --clip 0
# Shorter sequences make more steps: these are after 6, 11 and 17 % of them, when the curriculum has most of its way
# before it.
guarded=curriculum,early-freeze,early-freeze-positions
export PACER_CURRICULUM_START=8 PACER_CURRICULUM_SHARE=0.4
for share in 0.2 0.4; do
  start 4 "guard-$share" --arms "$guarded,early-freeze-unguarded" --onebit-freeze "$share"
done
start 4 guard-0.6 --arms "$guarded,early-freeze-refreshed,early-freeze-unguarded" --onebit-freeze 0.6
start 4 guard-0.4-floor-0.1 --arms "$guarded" --onebit-freeze 0.4 --onebit-floor 0.1
start 4 guard-0.6-floor-0.1 --arms "$guarded" --onebit-freeze 0.6 --onebit-floor 0.1
start 4 guard-0.6-floor-1 --arms "$guarded" --onebit-freeze 0.6 --onebit-floor 1
if [ -n "${LONG:-}" ]; then
  tokens=$LONG
  start 4 arms-long --arms fused-adamw,onebit-adam,onebit-adam-refreshed,frozen-uncompressed --seeds 1,2,3
  start 4 guard-long --arms "$guarded" --onebit-freeze 0.6
  start 4 guard-long-floor-0.1 --arms "$guarded" --onebit-freeze 0.6 --onebit-floor 0.1
fi
wait
[ ! -e "$folder/failed" ]
