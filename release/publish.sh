#!/usr/bin/env bash
# Create the release of the tag $GITHUB_REF_NAME with notes.md and the files of dist/release.
set -euo pipefail
cd "$(dirname "$0")/.."
gh release create "$GITHUB_REF_NAME" --verify-tag --title "$GITHUB_REF_NAME" --notes-file notes.md \
    dist/release/*.* dist/release/SHA256SUMS dist/release/compiled/*.yaml
