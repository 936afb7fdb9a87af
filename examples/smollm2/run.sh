#!/usr/bin/env bash
# The whole path on a real public model, SmolLM2-135M-Instruct, in one sitting on one GPU.
#
#   examples/smollm2/run.sh TARGET DATA OUT
#
# TARGET  the model: a Hub id, a local folder, or a folder with its GGUF file
# DATA    a folder with train/*.jsonl and bench/*.jsonl (lines with `messages`)
# OUT     where everything goes
# Sizes can be changed by environment variables, see below; the README's table names the sizes it used.
set -euo pipefail
target=$1 data=$2 out=$3
rows=${ROWS:-4000}             # training prompts, drawn over all files
answer=${ANSWER:-256}          # tokens an answer may have
workers=${WORKERS:-4}          # extraction processes; several fit on one GPU for a model this small
steps=${STEPS:-1200}
layers=${LAYERS:-5}
anchors=${ANCHORS:-256}
batch_rows=${BATCH_ROWS:-16}
limit=${LIMIT:-64}             # prompts per benchmark file
dflash=${DFLASH:-dflash}

step() {
    printf '\n$ dflash %s\n' "$*"
    local begun=$SECONDS
    $dflash "$@"
    printf '[%s: %s s]\n' "$1" $((SECONDS - begun))
}

step prepare "$data"/train/*.jsonl --target "$target" --out "$out/rows" --regenerate --max-rows "$rows" \
    --max-new-tokens "$answer" --max-length 1024 --on-bad-row skip
step extract --target "$target" --data "$out/rows" --out "$out/store.zarr" --shards "$workers" --topk 16
step train --store "$out/store.zarr" --run "$out/train" --steps "$steps" --num-layers "$layers" \
    --batch-rows "$batch_rows" --max-length 1024 --anchors "$anchors" --optimizer muon --learning-rate 5e-3 \
    --eval-every 400 --save-every 400
# gsm8k alone, for the clock; the others side by side, since batch-1 decoding leaves most of a GPU idle.
step eval --run "$out/train" --data "$data/bench/gsm8k.jsonl" --limit "$limit" --max-new-tokens "$answer" \
    --batch-size 64 --timed-prompts 3
pids=()
for name in math500 humaneval mbpp mt-bench; do
    step eval --run "$out/train" --data "$data/bench/$name.jsonl" --limit "$limit" --max-new-tokens "$answer" \
        --batch-size 64 --timed-prompts 0 --out "$out/eval-$name" > "$out/eval-$name.log" 2>&1 &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
# Last, so that the drafter's card names what it reaches.
step export --run "$out/train" --out "$out/drafter"
step query "SELECT name, prompts, acceptance_length, low, high, mismatches, ties FROM acceptance ORDER BY name" --in "$out"
