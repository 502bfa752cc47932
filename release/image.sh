#!/usr/bin/env bash
# One step for one image (launcher, server, trainer, trainer-cpu) in the registry $REGISTRY, such as
# ghcr.io/kfp-ddp:
#   release/image.sh build NAME                build for this machine, push by digest, print the digest
#   release/image.sh join NAME DIGEST...       put the platforms under one digest, and print it
#   release/image.sh sign NAME DIGEST          sign it as this workflow (cosign, keyless)
#   release/image.sh tag NAME DIGEST           name it by the version: it is public from here on
# Docker with buildx, and cosign, must be there, and logged in. With DRY_RUN=1 it prints their
# commands to stderr instead, and a digest of these.
set -euo pipefail
cd "$(dirname "$0")/.."
step=$1 name=$2
shift 2
registry=${REGISTRY:?}
registry=${registry,,} version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kfp_ddp/__init__.py)
image=${name%-cpu} device=cuda commit=$(git rev-parse HEAD)
[ "$image" = "$name" ] || device=cpu
[ -e "images/$image/Dockerfile" ] || { echo "there is no image $name" >&2; exit 2; }

run() {
    if [ -n "${DRY_RUN:-}" ]; then echo "+ $*" >&2; else "$@" >&2; fi
}
digest() {
    grep -Eom1 'sha256:[0-9a-f]{64}' <<< "$1" || { echo "no digest of $name in: $1" >&2; exit 1; }
}
stand_in() { echo "sha256:$(echo "$step $name $*" | sha256sum | cut -d ' ' -f 1)"; }

case $step in
build)
    mkdir -p build
    # A builder of its own: Docker's default one cannot push by digest, or attest.
    run docker buildx create --use
    run docker buildx build . --file "images/$image/Dockerfile" \
        --build-arg "DEVICE=$device" --build-arg "REVISION=$commit" \
        --sbom=true --provenance=mode=max --metadata-file "build/$name.json" \
        --label "org.opencontainers.image.version=$version" \
        --label "org.opencontainers.image.revision=$commit" \
        --label "org.opencontainers.image.licenses=Apache-2.0" \
        --output "type=image,name=$registry/$name,push-by-digest=true,name-canonical=true,push=true"
    if [ -n "${DRY_RUN:-}" ]; then stand_in; exit; fi
    digest "$(grep '"containerimage.digest"' "build/$name.json")"
    ;;
join)
    candidate=$registry/$name:candidate-${commit:0:12}
    run docker buildx imagetools create --tag "$candidate" "${@/#/$registry/$name@}"
    if [ -n "${DRY_RUN:-}" ]; then stand_in "$@"; exit; fi
    digest "$(docker buildx imagetools inspect "$candidate" | grep '^Digest:')"
    ;;
sign)
    run cosign sign --yes --recursive "$registry/$name@$1"
    ;;
tag)
    run docker buildx imagetools create --tag "$registry/$name:$version" "$registry/$name@$1"
    ;;
*)
    echo "no step $step: build, join, sign or tag" >&2
    exit 2
    ;;
esac
