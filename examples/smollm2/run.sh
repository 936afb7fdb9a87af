#!/usr/bin/env bash
# The whole path on a real public model, SmolLM2-135M-Instruct, in one sitting on one GPU.
#
#   examples/smollm2/run.sh TARGET DATA OUT
#
# TARGET  the model: a Hub id, a local folder, or a folder with its GGUF file
# DATA    a folder with train/*.jsonl and bench/*.jsonl (lines with `messages`)
# OUT     where everything goes
set -euo pipefail
target=$1 data=$2 out=$3
workers=${WORKERS:-4}      # extraction processes; several fit on one GPU for a model this small
steps=${STEPS:-3000}
limit=${LIMIT:-100}        # prompts per benchmark file
max_rows=${MAX_ROWS:-8000}

say() { printf '\n$ %s\n' "$*"; SECONDS=0; "$@"; printf '[%s took %ss]\n' "$2" "$SECONDS"; }

say dflash prepare "$data"/train/*.jsonl --target "$target" --out "$out/rows" --regenerate --max-rows "$max_rows" \
    --max-new-tokens 256 --max-length 1024 --on-bad-row skip --batch-size 1024
say dflash extract --target "$target" --data "$out/rows" --out "$out/store.zarr" --shards "$workers" --topk 16
say dflash train --store "$out/store.zarr" --run "$out/train" --steps "$steps" --batch-rows 16 --max-length 1024 \
    --anchors 256 --learning-rate 1e-3 --eval-every 1000 --save-every 1000
say dflash eval --run "$out/train" --data "$data/bench/gsm8k.jsonl" --limit "$limit" --untrained
say dflash eval --run "$out/train" --data "$data"/bench/*.jsonl --limit "$limit" --max-new-tokens 256
say dflash export --run "$out/train" --out "$out/drafter"
say dflash status "$out"
