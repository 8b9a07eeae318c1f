#!/usr/bin/env bash
# Build the images of a release from the last commit, with a list of packages (SBOM) and provenance in
# each. The provenance has the digests of the base images. Needs docker with buildx.
#   IMAGES    which: words of "proxy embedded sglang" (default: all)
#   REGISTRY  in front of each name, such as ghcr.io/owner/ (default: none)
#   PUSH      1 to push them; else each is written to out/images/NAME.tar
# out/images/NAME.txt has the name and the digest of each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/lib.sh
source deploy/lib.sh

OUT=$PWD/out/images

command -v docker >/dev/null && docker buildx version >/dev/null 2>&1 ||
    die "docker with buildx is needed to build images" "See https://docs.docker.com/build/install-buildx/"
[ -z "${PUSH-}" ] || [ -n "${REGISTRY-}" ] ||
    die "PUSH needs a registry to push to" "make images PUSH=1 REGISTRY=ghcr.io/OWNER/"

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git show -s --format=%ct HEAD)
export SOURCE_DATE_EPOCH
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
# What isn't committed is in no image.
git archive HEAD | tar -x -C "$source"
mkdir -p "$OUT"

for image in ${IMAGES:-proxy embedded sglang}; do
    case $image in
        proxy) file=Dockerfile.proxy name=leyline-proxy ;;
        embedded) file=Dockerfile name=leyline ;;
        sglang) file=Dockerfile.sglang name=leyline-sglang ;;
        *) die "no image $image" "There are: proxy embedded sglang" ;;
    esac
    name=${REGISTRY-}$name
    output=type=oci,dest=$OUT/$image.tar,rewrite-timestamp=true
    [ -z "${PUSH-}" ] || output=type=image,push=true,rewrite-timestamp=true
    say "images: $name:$version"
    docker buildx build --file "$source/deploy/$file" --tag "$name:$version" \
        --label "org.opencontainers.image.revision=$commit" \
        --label "org.opencontainers.image.version=$version" \
        --sbom=true --provenance=mode=max \
        --metadata-file "$OUT/$image.json" --output "$output" "$source"
    digest=$(sed -n 's/.*"containerimage.digest": *"\([^"]*\)".*/\1/p' "$OUT/$image.json")
    printf 'name=%s\ndigest=%s\n' "$name" "$digest" >"$OUT/$image.txt"
    say "images: $name@$digest"
done
