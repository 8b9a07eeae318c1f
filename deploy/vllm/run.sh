#!/usr/bin/env bash
# vLLM with a small model on the CPU, and Leyline's proxy in front of it, until Ctrl-C.
#   MODEL  folder or hub id of the model (default: a tiny Llama with random weights, out/vllm-model)
#   PORT   of vLLM (default 30100)
# Arguments go to the proxy; vLLM's log to out/vllm.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

RANDOM_MODEL=out/vllm-model
PORT=${PORT:-30100}
URL=http://127.0.0.1:$PORT
LOG=out/vllm.log
START_S=600

answers() {
    .venv/bin/python -P - "$URL/health" 2>/dev/null <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)
PYTHON
}

! answers || die "something already answers on $URL" "Choose another port: make vllm PORT=30101"
mkdir -p out
model=("${MODEL:-$RANDOM_MODEL}")
if [ -z "${MODEL-}" ]; then
    model+=(--served-model-name leyline-random)
    [ -f $RANDOM_MODEL/tokenizer_config.json ] ||
        .venv/bin/python -P deploy/vllm/tiny_model.py $RANDOM_MODEL 2>$LOG ||
        die "the model could not be written" "Its log: $LOG"
fi
say "vLLM on $URL, log in $LOG (takes a minute)"
# The wheel's package has another name than vLLM's, which the command vllm doesn't find. The worker
# runs in the engine core's process, as with one GPU: a process less to start.
VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false \
    .venv-vllm/bin/python -P -m vllm.entrypoints.openai.api_server \
    --model "${model[@]}" --host 127.0.0.1 --port "$PORT" \
    --dtype float32 --enforce-eager --block-size 32 --max-model-len 16384 \
    --max-num-batched-tokens 512 --max-num-seqs 8 \
    --enable-prefix-caching --enable-prompt-tokens-details \
    --kv-transfer-config '{"kv_connector":"LeylineConnector","kv_role":"kv_both"}' >$LOG 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT

until answers; do
    kill -0 $server 2>/dev/null || { tail -n 30 $LOG >&2; die "vLLM did not start" "Its whole log: $LOG"; }
    [ $SECONDS -lt $START_S ] || die "vLLM did not answer within $START_S s" "Its log: $LOG"
    sleep 1
done
.venv/bin/leyline serve --upstream "$URL" "$@"
