#!/bin/sh
# What a scale for the whole buffer, for each tensor or for each 2,048 elements is worth to 1-bit Adam, and to 1-bit
# LAMB: trains every combination and prints two tables in Markdown.
#
#   examples/scales/scales.sh [TEXT] [FOLDER]
#
# TEXT: a file or folder of text; left out or empty, LibTorch's headers. FOLDER: for a line of text from each run
# (run/scales), one folder for each text and number of ranks; run again after an interruption, finished runs are kept.
# For each model the rate is the best one of RATES (LAMB_RATES) for plain AdamW (LAMB) at the first seed. JOBS=N trains N
# at a time (as many as there are cores), with RANKS threads each (2). Also from the environment: SEEDS, STEPS, FREEZE,
# SCHEDULE (cosine, constant), MODELS, LAMB_MODELS, and HALF=1, which adds all combinations at half the rate.
set -eu
text=${1:-} folder=${2:-run/scales}
program=${SCALES:-build/release/examples/scales}
[ -x "$program" ] || { echo "scales.sh: $program is not there; build it with ./cmake/build.sh release examples" >&2; exit 2; }
jobs=${JOBS:-$(nproc)} seeds=${SEEDS:-1 2 3} steps=${STEPS:-300} freeze=${FREEZE:-60} schedule=${SCHEDULE:-cosine}
models=${MODELS-gpt gru conv embedding} rates=${RATES:-1e-3 2e-3 4e-3 8e-3 1.6e-2}
lamb_models=${LAMB_MODELS-gpt gru} lamb_rates=${LAMB_RATES:-5e-3 1e-2 2e-2 4e-2}
mkdir -p "$folder"
export program text folder

# The runs of standard input, one a line: MODEL OPTIMIZER SCALES SEED RATE.
train() {
  awk -v rest="--ranks ${RANKS:-2} --steps $steps --freeze $freeze --schedule $schedule" '{
    printf "--model %s --optimizer %s --scales %s --seed %s --learning-rate %g %s\n", $1, $2, $3, $4, $5, rest
  }' | xargs -P "$jobs" -I '{}' sh -c '
    run="$folder/$(echo "{}" | sed "s/^--//; s/ --\([a-z]*-\)*/-/g; s/ /=/g")"
    [ -s "$run" ] || { "$program" {} ${text:+--data "$text"} 2> "$run.log" > "$run.part" && mv "$run.part" "$run"; } ||
      { tail -1 "$run.log" >&2; exit 1; }'
}

# Every finished run of this length and schedule, one a line: MODEL OPTIMIZER SCALES SEED RATE LOSS.
results() {
  cat "$folder"/model=* 2> /dev/null | grep -h "steps $steps --freeze $freeze .*schedule $schedule:" |
    sed 's/^--model \([^ ]*\) --optimizer \([^ ]*\) --scales \([^ ]*\) --seed \([^ ]*\) .*--learning-rate \([^ ]*\) .*held-out \([^ ]*\) .*/\1 \2 \3 \4 \5 \6/'
}

# best_rate MODEL OPTIMIZER
best_rate() {
  results | awk -v model="$1" -v optimizer="$2" -v seed="${seeds%% *}" '
    $1 == model && $2 == optimizer && $4 == seed && (best == "" || $6 < loss) { best = $5; loss = $6 }
    END { print best }'
}

# compare "MODELS" "RATES" PLAIN "OPTIMIZER SCALES" ...: differences are to PLAIN, seed by seed.
compare() {
  models=$1 rates=$2 plain=$3
  shift 3
  for model in $models; do
    for rate in $rates; do echo "$model $plain buffer ${seeds%% *} $rate"; done
  done | train
  chosen=""
  for model in $models; do
    rate=$(best_rate "$model" "$plain")
    [ -z "${HALF:-}" ] || chosen="$chosen $model:$(awk "BEGIN { print $rate / 2 }")"
    chosen="$chosen $model:$rate"
  done
  for seed in $seeds; do
    for choice in $chosen; do
      for arm in "$plain buffer" "$@"; do echo "${choice%:*} $arm $seed ${choice#*:}"; done
    done
  done | train
  echo
  echo "| model | rate | optimizer | held-out loss | difference to $plain | seeds $seeds |"
  echo "| --- | --- | --- | --- | --- | --- |"
  for choice in $chosen; do
    for arm in "$plain buffer" "$@"; do
      results | awk -v model="${choice%:*}" -v rate="${choice#*:}" -v plain="$plain" -v arm="$arm" -v seeds="$seeds" '
        $1 == model && $5 + 0 == rate + 0 && $2 == plain { base[$4] = $6 }
        $1 == model && $5 + 0 == rate + 0 && $2 " " $3 == arm { loss[$4] = $6 }
        function spread(sum, squares) { return n > 1 ? sqrt((squares - sum * sum / n) / (n - 1) / n + 1e-18) : 0 }
        END {
          n = split(seeds, seed, " ")
          for (i = 1; i <= n; ++i) {
            l = loss[seed[i]]; d = l - base[seed[i]]
            s += l; ss += l * l; t += d; tt += d * d
            values = values (i > 1 ? ", " : "") sprintf("%.4f", l)
          }
          is_plain = arm == plain " buffer"
          if (!is_plain) difference = sprintf("%+.4f ± %.4f", t / n, spread(t, tt))
          split(arm, part, " ")
          name = "`" part[1] "`" (is_plain ? "" : ", " part[2])
          printf "| %s | %s | %s | %.4f ± %.4f | %s | %s |\n", is_plain ? model : "", is_plain ? rate : "", name, s / n, spread(s, ss), difference, values
        }'
    done
  done
}

[ -z "$models" ] || compare "$models" "$rates" adamw "onebit-adam buffer" "onebit-adam tensor" "onebit-adam block" "onebit-adam none"
[ -z "$lamb_models" ] || compare "$lamb_models" "$lamb_rates" lamb "onebit-lamb buffer" "onebit-lamb tensor" "onebit-lamb block" "onebit-lamb none"
