#!/usr/bin/env bash
# Tests of tests/e2e on a new cluster of kind: run.sh [ARGUMENTS OF PYTEST]
# It needs docker, kind, kubectl and the network. The smoke tests are the default; those
# of KServe and KubeRay skip.
set -euo pipefail
cd "$(dirname "$0")/../../.."
cluster=kfp-ddp-e2e
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' kfp_ddp/__init__.py)
images=("ghcr.io/kfp-ddp/launcher:$version" "ghcr.io/kfp-ddp/trainer:$version")
[ $# -gt 0 ] || set -- tests/e2e -m smoke --numprocesses 2 --dist loadfile --durations 10
node=kindest/node:v1.36.1@sha256:3489c7674813ba5d8b1a9977baea8a6e553784dab7b84759d1014dbd78f7ebd5
snapshots=https://github.com/kubernetes-csi/external-snapshotter
folder=$(mktemp -d)
trap 'kind delete cluster --name "$cluster"; rm -rf "$folder"' EXIT

docker build --file tests/e2e/kind/Dockerfile --build-arg "CHECKOUT=$PWD" \
    --tag "${images[0]}" --tag "${images[1]}" .
kind create cluster --name "$cluster" --image "$node" --wait 2m
kind load docker-image --name "$cluster" "${images[@]}"

kubectl delete storageclass standard # of kind, which knows no ReadWriteMany and no snapshots
kubectl apply -k "$snapshots/client/config/crd?ref=v8.6.0"
kubectl apply -k "$snapshots/deploy/kubernetes/snapshot-controller?ref=v8.6.0"
git clone --quiet --depth 1 --branch v1.18.0 \
    https://github.com/kubernetes-csi/csi-driver-host-path "$folder/hostpath"
"$folder/hostpath/deploy/kubernetes-latest/deploy.sh"
kubectl apply -f tests/e2e/kind/storage.yaml
kubectl apply --server-side -k "https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4"
kubectl apply --server-side -k "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0"
kubectl wait --all-namespaces --for condition=Available --timeout 5m --all deployments
kubectl apply --server-side -k "https://github.com/kubeflow/trainer.git/manifests/overlays/runtimes?ref=v2.3.0"

# On the node's network: pods reach servers that tests start, and tests reach pods and services.
kind get kubeconfig --name "$cluster" --internal > "$folder/kubeconfig"
docker run --rm --network "container:$cluster-control-plane" --volume "$folder:/cluster:ro" \
    --env KUBECONFIG=/cluster/kubeconfig "${images[0]}" pytest "$@"
