#!/usr/bin/env bash
# Build images without a container engine, on a base made from Debian's packages, and run a command
# beside their files:
#   images/build.sh "launcher trainer-cpu trainer" COMMAND…
# build/images/NAME.tar is an archive that `docker load` and a cluster's import read. While COMMAND
# runs, build/images/NAME/root is the image's file system and NAME/config.json its settings.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
for tool in buildah mmdebstrap; do command -v "$tool" > /dev/null || missing+=("$tool"); done
if [ ${#missing[@]} -gt 0 ]; then
    echo "images are built here by buildah and mmdebstrap: apt-get install ${missing[*]}" >&2
    exit 1
fi
# The root of a user namespace is enough.
[ "$(id -u)" = 0 ] || exec unshare --user --map-root-user --map-auto --mount "$0" "$@"

out=$PWD/build/images
registry=${REGISTRY:-images-test.local/kfp-ddp}
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kfp_ddp/__init__.py)
mkdir -p "$out"
storage=$(mktemp -d "${TMPDIR:-/tmp}/kfp-ddp-images.XXXXXX")
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-overlay}
buildah() { command buildah --root "$storage/root" --runroot "$storage/run" "$@"; }
clean() {
    buildah umount --all > /dev/null || true
    rm -rf "$storage" "$out"/*/
}
trap clean EXIT
# How this machine reaches its package index is mounted, so that none of it gets into an image.
mounts=()
for path in /etc/pip.conf /etc/ssl/certs; do
    [ ! -e "$path" ] || mounts+=(-v "$path:$path:ro")
done

if [ -z "${BASE:-}" ]; then
    # As in Debian's slim images, which the Dockerfiles name: merged /usr without usrmerge, which needs
    # all of perl, and no manuals or translations.
    [ -e "$out/slim.tar" ] || mmdebstrap --variant=minbase \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$out/slim.tar" \
        > "$out/slim.log" 2>&1 || { tail -n 20 "$out/slim.log" >&2; rm -f "$out/slim.tar"; exit 1; }
    BASE=localhost/base
    buildah bud --quiet --tag "$BASE" --file - "$out" > /dev/null << 'DOCKERFILE'
FROM scratch
ADD slim.tar /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -s python3 /usr/bin/python
DOCKERFILE
fi

for name in $1; do
    image=${name%-cpu}
    device=$([ "$name" = "$image" ] && echo cuda || echo cpu)
    echo "building $name, see $out/$name.log"
    buildah bud --build-arg "BASE=$BASE" --build-arg "DEVICE=$device" "${mounts[@]}" \
        --tag "localhost/$name" --file "images/$image/Dockerfile" . > "$out/$name.log" 2>&1 \
        || { tail -n 20 "$out/$name.log" >&2; exit 1; }
    rm -f "$out/$name.tar"
    buildah push --quiet "localhost/$name" "docker-archive:$out/$name.tar:$registry/$image:$version"
    mkdir -p "$out/$name"
    buildah inspect --type image "localhost/$name" > "$out/$name/config.json"
    ln -sfn "$(buildah mount "$(buildah from --pull-never "localhost/$name")")" "$out/$name/root"
done
"${@:2}"
