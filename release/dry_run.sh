#!/usr/bin/env bash
# All of a release that needs no network. The images are not built: their commands are printed, and
# digests of these stand for those of the images.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist/release}
export DRY_RUN=1 REGISTRY=${REGISTRY:-ghcr.io/kfp-ddp}
python() { .venv/bin/python "$@"; }

rm -rf "$out"
python -m release notes --tag "${TAG:-v$(python -m kfp_ddp --version | grep -o '[0-9].*')}"
python -m release packages "$out"
python -m release sboms "$out"
images=()
for name in launcher trainer server trainer-cpu; do
    platform=$(release/image.sh build "$name")
    digest=$(release/image.sh join "$name" "$platform")
    release/image.sh sign "$name" "$digest"
    release/image.sh tag "$name" "$digest"
    images+=("$REGISTRY/$name@$digest")
done
python -m release pipelines "$out" "${images[@]:0:2}"
python -m release sums "$out"
python -m release verify "$out" "${images[@]:0:2}"
