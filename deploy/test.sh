#!/usr/bin/env bash
# Run the tests as jobs on a few lanes: each lane takes the next job that no other has taken and
# whose needs are met. So installing and linting run beside the first tests, and no lane is idle
# while there is work. More lanes than cores, for many tests wait.
#   $1            pytest marker expression
#   $2 …          targets of the Makefile to make as well: setup, sglang-setup, vllm-setup, tools,
#                 lint; what isn't named must stand already. If one fails, the run ends.
#   LANES         how many lanes (default 3)
#   PYTEST_ARGS   what else to give pytest; a selection may match nothing in some jobs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

# Tiny models run fastest on one thread, and the lanes don't fight over cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# Dozens of processes import the same thousands of modules: only the first compiles them.
unset PYTHONDONTWRITEBYTECODE
unset MAKEFLAGS MAKELEVEL
NOTHING_SELECTED=5
PRINT_TRIES=600

args=(-m "$1")
eval "args+=(${PYTEST_ARGS-})" # words and quotes as on a command line
[ ! -t 1 ] || args+=(--color=yes)
asked=" ${*:2} "

names=() needs=() commands=()
job() { # a name, the jobs that must be done before, and a command in words
    names+=("$1") needs+=("$2") commands+=("$3")
}
target() { # such a job, where the caller named it
    case $asked in *" $1 "*) job "$@" ;; esac
}
target setup "" deploy/setup.sh
target sglang-setup "" deploy/sglang/setup.sh
target vllm-setup "" deploy/vllm/setup.sh
target tools setup "make tools"
target lint setup "make lint"
# The longest first; a process each, for what long tests leave in memory slows those after them.
job sglang sglang-setup "pytest_in .venv-sglang tests/sglang"
job e2e "setup sglang-setup vllm-setup tools" "pytest_in .venv tests/e2e tests/clients"
job unit "setup tools" "pytest_in .venv tests/unit --ignore=tests/unit/policies --ignore=tests/unit/render"
job integration "setup tools" "pytest_in .venv tests/integration"
job lab "setup sglang-setup vllm-setup" "pytest_in .venv tests/lab"
job vllm vllm-setup "pytest_in .venv-vllm tests/vllm"
job oracle setup "pytest_in .venv tests/oracle"
job policies setup "pytest_in .venv tests/unit/policies tests/unit/render"

work=$(mktemp -d)
mkdir "$work"/{taken,done,failed}

pytest_in() { # an environment, and words for its pytest
    local status=0
    "$1/bin/pytest" "${@:2}" "${args[@]}" || status=$?
    [ "$status" -eq 0 ] || { [ "$status" -eq $NOTHING_SELECTED ] && [ -n "${PYTEST_ARGS-}" ]; }
}
ready() { # the needs of a job: those that are jobs of this run must be done
    local need
    for need in $1; do
        [ -e "$work/done/$need" ] || [[ " ${names[*]} " != *" $need "* ]] || return 1
    done
}
show() { # a title, and a file; one lane at a time
    local try
    for ((try = 0; try < PRINT_TRIES; try++)); do
        ! mkdir "$work/printing" 2>/dev/null || break
        sleep 0.1
    done
    { say "$1" && cat "$2"; } 2>&1
    rmdir "$work/printing"
}
perform() { # the number of a job; false where others can't do without it
    local name=${names[$1]} command=${commands[$1]} log=$work/$1.log began=$SECONDS outcome=passed
    say "$name …"
    # shellcheck disable=SC2086  # words
    if ! $command >"$log" 2>&1 </dev/null; then
        outcome=FAILED
        : >"$work/failed/$name"
    fi
    show "$name: $outcome in $((SECONDS - began)) s" "$log"
    [ $outcome = passed ] || [ "${command%% *}" = pytest_in ] || return 1
    : >"$work/done/$name"
}
lane() {
    local number left
    while true; do
        left=0
        for number in "${!names[@]}"; do
            [ ! -e "$work/taken/$number" ] || continue
            left=1
            ready "${needs[$number]}" && mkdir "$work/taken/$number" 2>/dev/null || continue
            perform "$number" || return 1
            continue 2
        done
        [ $left -eq 1 ] || return 0
        sleep 0.5
    done
}

lanes=()
end() {
    local pid
    for pid in "${lanes[@]}"; do
        kill -- -"$pid" 2>/dev/null || true
    done
    wait
    rm -rf "$work"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# PyTorch is downloaded once, for all environments.
case $asked in *" setup "*) deploy/setup.sh torch ;; esac
set -m # a group for each, so that it can be ended with all that it started
for ((number = 0; number < ${LANES:-3}; number++)); do
    lane &
    lanes+=($!)
done
set +m
for _ in "${lanes[@]}"; do
    wait -n || die "the other jobs were ended" "They need what this one couldn't make."
done
failed=$(ls "$work/failed")
[ -z "$failed" ] || { say "failed: ${failed//$'\n'/, }" && exit 1; }
