#!/usr/bin/env bash
# Put the clients of deploy/clients.txt below .clients: npm's in folders, pip's in environments of
# their own. Does nothing where the pinned versions stand already. Needs .venv, Node 20, npm and, for
# openhands-sdk, Python 3.12; 8 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

PINS=deploy/clients.txt
ROOT=$PWD/.clients
NODE_AT_LEAST=20

[ -x .venv/bin/python ] || die "no .venv here" "Run: make setup"

need_node() {
    local major
    major=$(node -p 'process.versions.node.split(".")[0]' 2>/dev/null) || major=0
    if [ "$major" -lt $NODE_AT_LEAST ] || ! command -v npm >/dev/null; then
        die "Node $NODE_AT_LEAST or newer and npm are needed for agents that are npm packages"
    fi
}

install_npm() { # folder, packages…
    need_node
    mkdir -p "$1"
    npm install --prefix "$1" --no-audit --no-fund --loglevel=error "${@:2}" >&2
}

install_pip() { # folder, packages…; PYTHON may be another interpreter
    "${PYTHON:-.venv/bin/python}" -m venv --clear "$1"
    "$1/bin/python" -m pip --quiet --disable-pip-version-check install --no-input "${@:2}" >&2
}

install_pip312() { # the same, with Python 3.12 or newer
    local candidate recent='import sys; sys.exit(sys.version_info < (3, 12))'
    for candidate in .venv/bin/python python3.12 python3.13 python3.14 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        if "$candidate" -c "$recent" 2>/dev/null; then
            PYTHON=$candidate install_pip "$@"
            return
        fi
    done
    die "Python 3.12 or newer is needed for ${*:2}" "On Debian 13 or newer: sudo apt-get install python3 python3-venv"
}

grep -v '^#' "$PINS" | while read -r registry name packages; do
    folder=$ROOT/$name
    [ "$(cat "$folder/.leyline-pins" 2>/dev/null)" = "$packages" ] && continue
    say "clients: $packages"
    rm -rf "$folder"
    read -ra wanted <<<"$packages"
    "install_$registry" "$folder" "${wanted[@]}" </dev/null
    printf '%s\n' "$packages" >"$folder/.leyline-pins"
done
