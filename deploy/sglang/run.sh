#!/usr/bin/env bash
# SGLang with a small model on the CPU, and Leyline's proxy in front of it, until Ctrl-C.
#   MODEL  folder or hub id of the model (default: the trained one that ships with the package)
#   PORT   of SGLang (default 30000)
# Arguments go to the proxy; SGLang's log to out/sglang.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

SHIPPED=engine_patch/leyline_replay/models/trained/plain
PORT=${PORT:-30000}
URL=http://127.0.0.1:$PORT
LOG=out/sglang.log
model=(--model-path "${MODEL:-$SHIPPED}")
[ -n "${MODEL-}" ] || model+=(--served-model-name leyline-recall)
START_S=300

answers() {
    .venv/bin/python -P - "$URL/health" 2>/dev/null <<'PYTHON'
import sys, urllib.request
urllib.request.urlopen(sys.argv[1], timeout=5)
PYTHON
}

! answers || die "something already answers on $URL" "Choose another port: make sglang PORT=30001"
mkdir -p out
say "SGLang on $URL, log in $LOG (takes half a minute)"
.venv-sglang/bin/python -P -m leyline_lab.sglang_cpu.launch \
    "${model[@]}" --host 127.0.0.1 --port "$PORT" >$LOG 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true' EXIT

until answers; do
    kill -0 $server 2>/dev/null || { tail -n 30 $LOG >&2; die "SGLang did not start" "Its whole log: $LOG"; }
    [ $SECONDS -lt $START_S ] || die "SGLang did not answer within $START_S s" "Its log: $LOG"
    sleep 1
done
.venv/bin/leyline serve --upstream "$URL" "$@"
