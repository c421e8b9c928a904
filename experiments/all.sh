#!/usr/bin/env bash
# Makes every figure of README and pages that is in no folder results/ yet, and then the pages' tables and charts.
#
#   experiments/all.sh --list     what is missing, and about how long it will take
#   experiments/all.sh            a night on two idle cores; stopped and started again, it goes on
#
# To take figures again, first delete their file, or their lines in learning.jsonl. PYTHON=... chooses another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
is_list="${1:-}"

make() { # make FILE MINUTES SCRIPT FLAGS...: unless benchmarks/results/FILE is there
    local file="$1" minutes="$2"
    shift 2
    if [ -e "benchmarks/results/$file" ]; then return; fi
    echo "== $file: about $minutes minutes, by $*"
    if [ -z "$is_list" ]; then "$python" "benchmarks/$1" --output "benchmarks/results/$file" "${@:2}"; fi
}

# These hold many runs, and go on by themselves
for script in learning.py "overoptimization.py --jobs 2" forks.py questions.py takeoff.py agent.py watch.py; do
    echo "== $script"
    # shellcheck disable=SC2086
    "$python" experiments/$script ${is_list:+--list}
done
make throughput.json 22 throughput.py --settings tiny,small,toy,vocab --keep-memory --repeats 1
make throughput-gpt2.json 7 throughput.py --settings gpt2 --algorithms ppo --repeats 1
make throughput-gpt2-rloo.json 5 throughput.py --settings gpt2 --algorithms rloo --repeats 1
make throughput-bf16.json 5 throughput.py --settings tiny,small --bf16 --repeats 1
make throughput-trl07.json 4 throughput.py --settings tiny,small --algorithms ppo --against 0.7.11 --repeats 1
make throughput-trl116.json 4 throughput.py --settings tiny,small --algorithms rloo --against 1.16 --repeats 1
make throughput-grpo.json 4 throughput.py --settings tiny,small,toy --algorithms grpo --against 1.16 --repeats 1
make throughput-growth.json 20 throughput.py --growth --algorithms ppo
make memory-measured.json 5 memory.py --measure
make memory-starting.json 3 memory.py --starting
if [ -z "$is_list" ]; then "$python" experiments/tables.py; fi
