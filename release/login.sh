#!/usr/bin/env bash
# Log in to the registry of $REGISTRY as $GITHUB_ACTOR, by $TOKEN.
set -euo pipefail
docker login "${REGISTRY%%/*}" --username "$GITHUB_ACTOR" --password-stdin <<< "$TOKEN"
