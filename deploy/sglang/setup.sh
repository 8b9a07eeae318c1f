#!/usr/bin/env bash
# Make .venv-sglang: SGLang for machines without a GPU, with Leyline and what its tests need.
# Does nothing when that already stands. Needs .venv (deploy/setup.sh), whose Python it takes.
#   TORCH_INDEX  extra package index for PyTorch, such as the one of its CPU builds
# On a GPU machine don't use this: pip install '.[sglang]' takes SGLang as it comes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

VENV=.venv-sglang
STAMP=$VENV/.leyline-setup
REQUIREMENTS=deploy/sglang/requirements-cpu.txt

fingerprint() {
    { cat "${PROJECTS[@]}" $REQUIREMENTS deploy/sglang/setup.sh; printf '%s\n' "$PWD" "${TORCH_INDEX-}"; } |
        sha256sum | cut -d ' ' -f 1
}

wanted=$(fingerprint)
if [ -x $VENV/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi
[ -x .venv/bin/python ] || die "no .venv here" "Run: make setup"

started=$SECONDS
if ! $VENV/bin/python -m pip --version >/dev/null 2>&1; then
    say "sglang 1/3: $VENV with $(.venv/bin/python --version)"
    .venv/bin/python -m venv --clear $VENV
fi
rm -f $STAMP

# Most modules are never imported: compiling all of them takes longer than installing them.
pip=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install --no-input --no-compile)
torch=$(grep '^torch==' $REQUIREMENTS)
mapfile -t options < <(torch_options)
say "sglang 2/3: $torch and SGLang (1 GB; a few minutes on a slow line)"
# With its dependencies: elsewhere than on a CPU index PyTorch's build brings libraries along.
"${pip[@]}" "${options[@]}" --constraint $REQUIREMENTS "$torch"
"${pip[@]}" "${options[@]}" --no-deps --requirement $REQUIREMENTS
say "sglang 3/3: leyline"
"${pip[@]}" --no-deps --editable . --editable ./engine_patch --editable ./bench
# torchvision has no build for this PyTorch; SGLang imports it even for text models.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$PWD/deploy/sglang/stubs" >"$site/leyline-sglang-stubs.pth"
"$VENV/bin/python" -W ignore -c 'import sglang.srt.server_args' ||
    die "SGLang doesn't load in $VENV" "To start afresh: rm -rf $VENV && make sglang-setup"
printf '%s\n' "$wanted" >$STAMP
say "sglang done in $((SECONDS - started)) s; the server is started by: make sglang"
