#!/usr/bin/env bash
# The inner loop of a change: format, lint and type-check what changed, and run its tests.
#   FILES         files or folders (default: what differs from the last commit)
#   PYTEST_ARGS   what to give pytest besides; without tests among FILES, it chooses among all of them,
#                 and only their collection takes over a minute
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

read -ra files <<<"${FILES-}"
if [ ${#files[@]} -eq 0 ]; then
    mapfile -t files < <(git diff --name-only --diff-filter=d HEAD && git ls-files --others --exclude-standard)
fi
sources=() tests=()
for file in "${files[@]}"; do
    file=${file#./} file=${file%/}
    [ -e "$file" ] || die "$file: there is no such file or folder"
    case $file in
        tests/sglang* | tests/vllm*) say "$file runs in an environment of its own: see CONTRIBUTING.md" ;;
        tests/*/test_*.py | tests/test_*.py) tests+=("$file") ;;
        tests | tests/*) if [ -d "$file" ]; then tests+=("$file"); fi ;;
    esac
    if [ -d "$file" ] || [[ $file == *.py ]]; then sources+=("$file"); fi
done
if [ ${#sources[@]} -gt 0 ]; then
    say "ruff: ${sources[*]}"
    .venv/bin/ruff check "${sources[@]}"
    .venv/bin/ruff format --check "${sources[@]}"
    say "mypy" # of all, for a change may break what it doesn't touch; it remembers what it knows
    .venv/bin/mypy
fi
args=()
eval "args+=(${PYTEST_ARGS-})" # words and quotes as on a command line
if [ ${#tests[@]} -gt 0 ] || [ ${#args[@]} -gt 0 ]; then
    say "pytest ${tests[*]} ${args[*]}"
    exec .venv/bin/pytest -q -m "not nightly and not gpu" "${tests[@]}" "${args[@]}"
fi
[ ${#sources[@]} -gt 0 ] || say "nothing to check: no Python file differs from the last commit, or FILES has none"
