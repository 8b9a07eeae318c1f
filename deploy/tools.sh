#!/usr/bin/env bash
# Put Prometheus (server and promtool), which the board tests need, into .venv/bin.
# Where the system has none, the Debian package is unpacked below .venv: that takes no root, and
# no service is installed or started. Where that can't be done, those tests are skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

BIN=$PWD/.venv/bin
HOME_DIR=$PWD/.venv/debian

have() { [ -x "$BIN/$1" ] || command -v "$1" >/dev/null; }
have prometheus && have promtool && exit 0

give_up() {
    say "no Prometheus: $1. The tests that need it will be skipped (and fail in CI)."
    say "On Debian: sudo apt-get install prometheus"
    exit 0
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || give_up "this is no Debian system"
say "tools: fetching the Debian package prometheus (20 MB) into .venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# Package lists of our own: no root, and the system's are left as they are.
apt=(apt-get -qq -o APT::Sandbox::User="$(id -un)" -o Acquire::Retries=1 -o Acquire::http::Timeout=20
    -o Acquire::https::Timeout=20 -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache")
(cd "$work" && "${apt[@]}" update && "${apt[@]}" download prometheus) >&2 ||
    give_up "the package could not be fetched"
rm -rf "$HOME_DIR"
mkdir -p "$HOME_DIR"
dpkg-deb -x "$work"/prometheus_*.deb "$HOME_DIR"
for program in prometheus promtool; do
    "$HOME_DIR/usr/bin/$program" --version >/dev/null 2>&1 || give_up "$program does not run here"
    ln -sf "$HOME_DIR/usr/bin/$program" "$BIN/$program"
done
say "tools: $("$BIN/promtool" --version 2>&1 | head -n 1)"
