#!/usr/bin/env bash
# The whole of RLHF on the toy world: texts -> policy -> reward model -> better policies -> win rates -> report.md.
#
#   toy/pipeline.sh [FOLDER]      by default runs/pipeline; some ten minutes on two CPU cores
#
# Run it again after an interruption, and it goes on where it stopped. PYTHON=... chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/pipeline}" python="${PYTHON:-python}"
gold="toy/gold_score.py:gold_score"

train() { # train SCRIPT FLAGS...: the run $out/SCRIPT, made, resumed or left as it is
    local script="$1" run="$out/$1" resume=()
    shift
    if [ -e "$run.done" ]; then return; fi
    if [ -e "$run/args.json" ]; then resume=(--resume "$run"); fi
    echo "== $script"
    SECONDS=0
    "$python" "$script.py" "${resume[@]:---output-dir=$run}" "$@"
    echo "$SECONDS" >"$run.done"
}

judge() { # judge POLICY: how often the gold score prefers its answers to those of the SFT policy, and their KL to it
    local pairs="$out/compare-$1" answers="$out/evaluate-$1"
    if [ ! -e "$pairs/compare.json" ]; then
        echo "== $1 beside sft"
        rm -rf "$pairs"
        "$python" tools/compare.py "$out/$1" "$out/sft" --reward-fn "$gold" --temperature 0.7 --num-prompts 200 \
            --output-dir "$pairs"
    fi
    if [ ! -e "$answers/evaluation.json" ]; then
        rm -rf "$answers"
        "$python" tools/evaluate.py "$out/$1" --reference "$out/sft" --reward-fn "$gold" --output-dir "$answers"
    fi
}

mkdir -p "$out"
train sft --num-train-epochs 2
train reward_model --model "$out/sft" --num-train-epochs 2 --learning-rate 1e-3 --eos-dropout 0.5
models=(--model "$out/sft" --reward-model "$out/reward_model" --reward-fn reward_model "$gold" --reward-weights 1 0)
train ppo "${models[@]}"
train rloo "${models[@]}"
train grpo "${models[@]}" --missing-eos-penalty 1 --dataset toy/data/prompts --response-length 53 --temperature 0.7 \
    --beta 0.05 --total-episodes 4096
train dpo --model "$out/sft"
for policy in ppo rloo grpo dpo; do judge "$policy"; done
"$python" toy/report.py "$out"
