#!/usr/bin/env bash
# Pin the images of others by the digests of their tags: the bases in the Dockerfiles, and the
# services in compose.yaml. Asks the registries. Needs a network, and docker with buildx.
#   CHECK   1 to change nothing, and to fail if a digest is missing or isn't its tag's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

FILES=(deploy/Dockerfile deploy/Dockerfile.proxy deploy/Dockerfile.sglang deploy/compose.yaml)

command -v docker >/dev/null && docker buildx version >/dev/null 2>&1 ||
    die "docker with buildx is needed to look digests up" "See https://docs.docker.com/build/install-buildx/"

stale=0
# Those that are built here have no digest before.
for image in $(sed -nE 's/^(FROM| +image:) ([^ ]+)( AS .*)?$/\2/p' "${FILES[@]}" | grep -v '^leyline' | sort -u); do
    tag=${image%@*}
    digest=$(docker buildx imagetools inspect "$tag" --format '{{.Manifest.Digest}}') ||
        die "the registry has no $tag" "Is the network there, and the tag right?"
    [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || die "no digest of $tag: $digest" "Update docker buildx"
    [ "$image" != "$tag@$digest" ] || continue
    stale=1
    say "digests: $tag@$digest"
    [ -n "${CHECK-}" ] || sed -i -E "s#^(FROM| +image:) $image( |\$)#\1 $tag@$digest\2#" "${FILES[@]}"
done
[ -z "${CHECK-}" ] || [ "$stale" = 0 ] || die "digests are missing or old" "make digests"
