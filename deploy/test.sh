#!/usr/bin/env bash
# Run all tests on two lanes at once, which take about as long as each other:
#   here        .venv: tests/integration, and then everything but the other lane's
#   beside it   .venv-sglang: tests/sglang, and then .venv: UNITS and OTHERS
#   $1            pytest marker expression
#   PYTEST_ARGS   what else to give pytest; a selection may match nothing in one of them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

# Tiny models run fastest on one thread, and the two lanes don't fight over cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
NOTHING_SELECTED=5
UNITS=(tests/unit/policies tests/unit/render)
OTHERS=(tests/oracle tests/e2e tests/clients)
BESIDE=("${UNITS[@]}" "${OTHERS[@]}")

args=(-m "$1")
eval "args+=(${PYTEST_ARGS-})" # words and quotes as on a command line

passes() { # status of a pytest run
    [ "$1" -eq 0 ] || { [ "$1" -eq $NOTHING_SELECTED ] && [ -n "${PYTEST_ARGS-}" ]; }
}
run() { # a title, and a command
    local status=0
    say "$1"
    "${@:2}" || status=$?
    passes "$status"
}
beside() {
    local failed=0
    run "pytest with SGLang" .venv-sglang/bin/pytest tests/sglang "${args[@]}" || failed=1
    run "pytest, ${UNITS[*]}" .venv/bin/pytest "${UNITS[@]}" "${args[@]}" || failed=1
    run "pytest, ${OTHERS[*]}" .venv/bin/pytest "${OTHERS[@]}" "${args[@]}" || failed=1
    return $failed
}

output=$(mktemp)
set -m # a group of its own, so that it can be ended with all that it started
beside >"$output" 2>&1 &
lane=$!
set +m
trap 'kill -- -"$lane" 2>/dev/null || true; rm -f "$output"' EXIT

failed=0
# A process each: what long tests leave in memory slows those after them.
run "pytest, tests/integration" .venv/bin/pytest tests/integration "${args[@]}" || failed=1
run "pytest" .venv/bin/pytest tests "${BESIDE[@]/#/--ignore=}" --ignore=tests/integration "${args[@]}" ||
    failed=1
wait "$lane" || failed=1
cat "$output"
exit $failed
