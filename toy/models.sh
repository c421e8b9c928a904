#!/usr/bin/env bash
# Makes every model that is shipped in toy/ again, with the scripts' own commands, and puts each where it belongs.
#
#   toy/models.sh [FOLDER]      runs go to FOLDER, by default runs/models; ten minutes on one thread of a CPU
#
# One thread, because rounding depends on their number: on the same processor the same weights come out again.
# Run it again after an interruption, and it goes on where it stopped. PYTHON=... chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/models}" python="${PYTHON:-python}"
export OMP_NUM_THREADS=1
files=(config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json)

train() { # train FOLDER SCRIPT FLAGS...: the run $out/FOLDER, whose model then replaces toy/FOLDER
    local name="$1" script="$2" run="$out/$1" resume=()
    shift 2
    if [ -e "$run.done" ]; then return; fi
    if [ -e "$run/args.json" ]; then resume=(--resume "$run"); fi
    echo "== $script: toy/$name"
    "$python" "$script" "${resume[@]:---output-dir=$run}" "$@"
    mkdir -p "toy/$name"
    for file in "${files[@]}"; do
        if [ -e "$run/$file" ]; then cp "$run/$file" "toy/$name/"; fi
    done
    touch "$run.done"
}

"$python" toy/make.py
train sft sft.py --num-train-epochs 3
train reward_model reward_model.py --num-train-epochs 2 --learning-rate 1e-3 --eos-dropout 0.5 --seed 2
"$python" toy/shells/make.py
train shells/sft sft.py --from-scratch toy/shells/base --num-train-epochs 4 --batch-size 32 --learning-rate 2e-3 \
    --dataset toy/shells/data/sft
"$python" toy/guess/make.py
"$python" toy/guess/make.py --output "$out/guess-texts" --texts
train guess/sft sft.py --from-scratch toy/guess/base --num-train-epochs 3 --batch-size 64 --learning-rate 4e-3 \
    --dataset "$out/guess-texts/data/legal"
if [ ! -e "$out/shapes.done" ]; then
    echo "== toy/shapes"
    "$python" toy/shapes/make.py
    touch "$out/shapes.done"
fi
