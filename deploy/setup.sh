#!/usr/bin/env bash
# Make .venv with the project and everything it needs. Does nothing when that already stands.
#   $1           "torch" to stop at an environment that has only PyTorch
#   PYTHON       interpreter to use (default: the first of python3, python3.11 … that is >= 3.11)
#   TORCH_INDEX  extra package index for PyTorch, such as the one of its CPU builds; the default
#                Linux build brings some gigabytes of CUDA libraries along.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

VENV=.venv
STAMP=$VENV/.leyline-setup
RECENT='import sys; sys.exit(sys.version_info < (3, 11))'

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "$RECENT" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found (looked for: ${PYTHON:-python3 python3.11 python3.12 python3.13})" \
        "On Debian 12 or newer: sudo apt-get install python3 python3-venv" \
        "or name one: make setup PYTHON=/path/to/python3.12"
}

# Debian keeps ensurepip, without which there is no venv, in a package of its own.
require_venv_module() {
    local python=$1 package
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
    if command -v apt-get >/dev/null; then
        say "$package is missing; installing it with apt-get"
        if as_root apt-get -qq update &&
            as_root env DEBIAN_FRONTEND=noninteractive \
                apt-get -qq install -y --no-install-recommends "$package" >&2 &&
            "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            return
        fi
    fi
    die "$python can't make virtual environments: its venv module is not installed" \
        "On Debian or Ubuntu: sudo apt-get install $package" \
        "then run make again"
}

fingerprint() {
    { cat "${PROJECTS[@]}" deploy/constraints.txt deploy/setup.sh; printf '%s\n' "$PWD" "${TORCH_INDEX-}"; } |
        sha256sum | cut -d ' ' -f 1
}

wanted=$(fingerprint)
if [ -x $VENV/bin/python ] && [ "$(cat $STAMP 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

started=$SECONDS
if ! $VENV/bin/python -c "$RECENT; import pip" 2>/dev/null || ! $VENV/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    require_venv_module "$python"
    say "setup 1/3: $VENV with $("$python" --version)"
    "$python" -m venv --clear $VENV
fi
rm -f $STAMP

# Most modules are never imported: compiling all of them takes longer than installing them.
pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile
    --constraint deploy/constraints.txt)
torch=$(grep '^torch==' deploy/constraints.txt)
mapfile -t options < <(torch_options)
if [ -n "${TORCH_INDEX-}" ]; then
    say "setup 2/3: $torch (200 MB for the CPU build; a few minutes on a slow line)"
else
    say "setup 2/3: $torch with CUDA, where pip's index has it (some GB); the CPU build takes 200 MB:" \
        "TORCH_INDEX=https://download.pytorch.org/whl/cpu make setup"
fi
"${pip[@]}" "${options[@]}" "$torch"
[ "${1-}" != torch ] || exit 0
say "setup 3/3: leyline and the development tools (some $(grep -c == deploy/constraints.txt) packages)"
"${pip[@]}" --editable '.[dev]' --editable ./engine_patch --editable ./bench
printf '%s\n' "$wanted" >$STAMP
say "setup done in $((SECONDS - started)) s; the command line is $VENV/bin/leyline"
