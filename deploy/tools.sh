#!/usr/bin/env bash
# Put the servers that tests run into .venv/bin: Prometheus (server and promtool) and Redis (server
# and redis-cli). Where the system has none, Debian's packages are unpacked below .venv: that takes
# no root, and no service is installed or started. Chromium, which tests open the live page in, is
# installed, which takes root. Where that can't be done, the tests that need them are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

BIN=$PWD/.venv/bin
HOME_DIR=$PWD/.venv/debian

have() { [ -x "$BIN/$1" ] || command -v "$1" >/dev/null; }

give_up() {
    say "no $names: $1. The tests that need it will be skipped (and fail in CI)."
    say "On Debian: sudo apt-get install ${packages[*]}"
    exit 0
}

# It needs too many libraries, settings and fonts to be unpacked beside the system's.
require_chromium() {
    have chromium && return
    if command -v apt-get >/dev/null; then
        say "tools: installing the Debian package chromium (about 300 MB)"
        if as_root apt-get -qq update &&
            as_root env DEBIAN_FRONTEND=noninteractive \
                apt-get -qq install -y --no-install-recommends chromium >&2 &&
            have chromium; then
            say "tools: $(chromium --version 2>/dev/null)"
            return
        fi
    fi
    say "no chromium: installing it takes root, or sudo without a password, on Debian."
    say "The tests that need it will be skipped (and fail in CI). sudo apt-get install chromium"
}

require_chromium

wanted=()
packages=()
libraries=()
if ! { have prometheus && have promtool; }; then
    wanted+=(prometheus promtool)
    packages+=(prometheus)
fi
if ! { have redis-server && have redis-cli; }; then
    wanted+=(redis-server redis-cli)
    packages+=(redis-server)
    # redis-server is a link to a program of redis-tools.
    libraries+=(redis-tools libjemalloc2 liblzf1 libatomic1)
fi
[ "${#wanted[@]}" -gt 0 ] || exit 0
names=${packages[*]}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "this is no Debian system"
say "tools: fetching the Debian packages $names into .venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# Package lists of our own: no root, and the system's are left as they are.
apt=(apt-get -qq -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=1 -o Acquire::http::Timeout=20
    -o Acquire::https::Timeout=20 -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
(cd "$work" && "${apt[@]}" update && "${apt[@]}" download "${packages[@]}" "${libraries[@]}") >&2 ||
    give_up "the packages could not be fetched"
mkdir -p "$HOME_DIR"
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$HOME_DIR"
done
# No other program finds the unpacked libraries: the linker's settings stay as they are.
library=$(find "$HOME_DIR/usr/lib" -name 'libjemalloc.so.*' -print -quit 2>/dev/null || true)
for program in "${wanted[@]}"; do
    rm -f "$BIN/$program"
    # shellcheck disable=SC2016  # expanded when the program is started
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" exec "%s" "$@"\n' \
        "${library%/*}" "$HOME_DIR/usr/bin/$program" >"$BIN/$program"
    chmod +x "$BIN/$program"
    if ! "$BIN/$program" --version >/dev/null 2>&1; then
        rm -f "$BIN/$program"
        give_up "$program does not run here"
    fi
    say "tools: $("$BIN/$program" --version 2>&1 | head -n 1)"
done
