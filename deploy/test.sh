#!/usr/bin/env bash
# Run the tests of both environments at once, one process each: .venv, and tests/sglang in .venv-sglang.
#   $1            pytest marker expression
#   PYTEST_ARGS   what else to give pytest; a selection may match nothing in one of the two
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

# Tiny models run fastest on one thread, and the two processes don't fight over cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
NOTHING_SELECTED=5

args=(-m "$1")
eval "args+=(${PYTEST_ARGS-})" # words and quotes as on a command line

output=$(mktemp)
trap 'kill "$sglang" 2>/dev/null || true; rm -f "$output"' EXIT
.venv-sglang/bin/pytest tests/sglang "${args[@]}" >"$output" 2>&1 &
sglang=$!

failed=0
passes() { # status of a pytest run
    [ "$1" -eq 0 ] || { [ "$1" -eq $NOTHING_SELECTED ] && [ -n "${PYTEST_ARGS-}" ]; }
}
say "pytest"
.venv/bin/pytest "${args[@]}" && status=0 || status=$?
passes "$status" || failed=1
wait "$sglang" && status=0 || status=$?
say "pytest with SGLang"
cat "$output"
passes "$status" || failed=1
exit $failed
