"""The real KServe of the cluster, or a stand-in for its controller with Knative.

Knative's network layer is not available. The stand-in takes InferenceServices by KServe's own
definition, makes a Deployment and a Service of each revision with Knative's names, and sets the
status as KServe v0.20 does. It has no storage initializer, autoscaling, ingress, or sharing of
requests; it only reports the shares. Both run the server below: Triton's image is not available.
"""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.e2e.harness import workflow
from tests.e2e.harness.grounds import IMAGE, UID, Grounds, with_retries

GROUP, VERSION, PLURAL = "serving.kserve.io", "v1beta1", "inferenceservices"
POD_OF = "serving.kserve.io/inferenceservice"
REVISION = "serving.knative.dev/revision"

# config/crd/full/serving.kserve.io_inferenceservices.yaml of kserve/kserve at v0.20.0 (commit
# 1fb7810, Apache-2.0) as JSON, without the descriptions.
DEFINITION = Path(__file__).with_name("inferenceservices.json.gz")
KNATIVE, STANDARD = "Knative", "Standard"
READER = "reader"
"""The service account with the secret of the bucket."""

# Answers as serving/answer.json of its bundle says, and stops at once.
SERVER = """
import json, os, signal, sys, time, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if os.path.isdir("/mnt/models"):
    answer = json.load(open("/mnt/models/answer.json"))
else:
    path = os.environ["STORAGE_URI"].removeprefix("s3://")
    answer = json.load(urllib.request.urlopen(f"{os.environ['BUCKETS']}/{path}/answer.json"))
fault, response = answer["fault"], answer["response"]
if fault == "crash":
    sys.exit("the model cannot be loaded")
if fault == "wrong":
    response["outputs"][0]["data"] = [x + 1 for x in response["outputs"][0]["data"]]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        ready = fault != "unready"
        self.send_response(200 if ready else 503)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["inputs"][0]["datatype"] == "UINT8"
        if fault == "slow":
            time.sleep(30)
        body = json.dumps(response).encode()
        found = self.path == f"/v2/models/{response['model_name']}/infer"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""


def container(**more: Any) -> dict[str, Any]:
    """Return the container of the server above."""
    return {
        "name": "kserve-container",
        "image": IMAGE,
        "command": ["python3", "-u", "-c", SERVER],
        "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": 8080},
                           "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}},
        **more,
    }  # fmt: skip


def is_installed(api: client.ApiClient) -> bool:
    """Return whether the cluster has the real controller."""
    try:
        client.AppsV1Api(api).read_namespaced_deployment("kserve-controller-manager", "kserve")
    except client.ApiException:
        return False
    return True


class Kserve:
    """InferenceServices of a namespace, in one of KServe's modes."""

    def __init__(self, grounds: Grounds, mode: str) -> None:
        self.grounds, self.mode = grounds, mode
        self.apps = client.AppsV1Api(grounds.api)

    def services(self) -> list[dict[str, Any]]:
        """Return all of the namespace."""
        space = self.grounds.namespace
        list_all = self.grounds.custom.list_namespaced_custom_object
        answer = with_retries(lambda: list_all(GROUP, VERSION, space, PLURAL))
        services: list[dict[str, Any]] = answer["items"]
        return services

    def service(self, name: str) -> dict[str, Any] | None:
        """Return the current InferenceService."""
        return next((one for one in self.services() if one["metadata"]["name"] == name), None)

    def pods(self, deployment: str) -> set[str]:
        """Return the UIDs of a Deployment's pods that are not being deleted."""
        space, selector = self.grounds.namespace, f"app=isvc.{deployment}"
        pods = self.grounds.core.list_namespaced_pod(space, label_selector=selector).items
        return {pod.metadata.uid for pod in pods if not pod.metadata.deletion_timestamp}


@contextmanager
def running(grounds: Grounds, mode: str) -> Iterator[Kserve]:
    """Run KServe in a namespace; skips the test where its mode cannot be had."""
    real = is_installed(grounds.api)
    if real != (mode == STANDARD):
        pytest.skip(f"KServe's controller is {'' if real else 'not '}installed")
    if real:
        _prepare(grounds)
        yield Kserve(grounds, mode)
        return
    workflow.establish(grounds.api, json.loads(gzip.decompress(DEFINITION.read_bytes())))
    with StandIn(grounds, mode).running() as stand_in:
        yield stand_in


def _prepare(grounds: Grounds) -> None:
    """Give the namespace the login of the bucket, and the server above in the place of Triton."""
    given = grounds.environment
    endpoint = given["AWS_ENDPOINT_URL_S3"].removeprefix("http://")
    of_s3 = {"serving.kserve.io/s3-endpoint": endpoint, "serving.kserve.io/s3-usehttps": "0"}
    keys = {name: given[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    secret = {"metadata": {"name": READER, "annotations": of_s3}, "stringData": keys}
    account = {"metadata": {"name": READER}, "secrets": [{"name": READER}]}
    grounds.core.create_namespaced_secret(grounds.namespace, secret)
    grounds.core.create_namespaced_service_account(grounds.namespace, account)
    body = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": "kserve-tritonserver"},
        "spec": {
            "supportedModelFormats": [{"name": "onnx"}],
            "protocolVersions": ["v2"],
            "containers": [container()],
        },
    }
    grounds.custom.create_namespaced_custom_object(
        GROUP, "v1alpha1", grounds.namespace, "servingruntimes", body
    )


class StandIn(Kserve):
    """Creates the objects of InferenceServices of one namespace, and sets their status."""

    def __init__(self, grounds: Grounds, mode: str) -> None:
        super().__init__(grounds, mode)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator["StandIn"]:
        """Reconcile while the block lasts."""
        self._thread.start()
        try:
            yield self
        finally:
            self._over.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.3):
            for service in self.services():
                with suppress(client.ApiException):  # of a change meanwhile; the next turn sees it
                    self._reconcile(service)

    def _reconcile(self, service: dict[str, Any]) -> None:
        old = service.get("status") or {}
        status = self._knative(service, old)
        if status != old:
            self.grounds.custom.patch_namespaced_custom_object_status(
                GROUP, VERSION, self.grounds.namespace, PLURAL,
                service["metadata"]["name"], {"status": status},
            )  # fmt: skip

    def _knative(self, service: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        """Return the status with a revision for each template, and shares as by KServe."""
        predictor, base = service["spec"]["predictor"], f"{service['metadata']['name']}-predictor"
        known = dict((old.get("components") or {}).get("predictor") or {})
        template = json.dumps({**predictor, "canaryTrafficPercent": 0, "_": _annotations(service)})
        revisions = {r.metadata.annotations["template"]: r for r in self._deployments(service)}
        number = len(revisions) + (template not in revisions)
        if template in revisions:
            number = int(revisions[template].metadata.name[-5:])
        created = f"{base}-{number:05}"
        deployment = self._deployment(service, created, {REVISION: created}, template)
        ready = _of_deployment(deployment)
        known["latestCreatedRevision"] = created
        if ready[0] == "True":
            known["latestReadyRevision"] = created
        latest = str(known.get("latestReadyRevision", ""))
        rolled_out = str(known.get("latestRolledoutRevision", ""))
        percent = predictor.get("canaryTrafficPercent")
        if latest:
            share = 100 if percent is None or not rolled_out else int(percent)
            traffic = [_target(latest, share, True, "latest")]
            if share < 100:
                traffic.append(_target(rolled_out, 100 - share, False, "prev"))
            elif rolled_out != latest:
                known |= {"previousRolledoutRevision": rolled_out}
                known |= {"latestRolledoutRevision": latest}
            most = max(traffic, key=lambda each: int(each["percent"]))["revisionName"]
            self._address(service, base, {REVISION: most})
            self._address(service, f"latest-{base}", {REVISION: latest})
            host = f"http://{base}.{self.grounds.namespace}.svc.cluster.local"
            known |= {"traffic": traffic, "address": {"url": host}}
        routed = ("True", "", "") if latest else ("Unknown", "RevisionMissing", "no revision yet")
        return {
            "deploymentMode": "Knative",
            "conditions": _conditions(PredictorReady=ready, IngressReady=routed),
            "components": {"predictor": known},
        }

    def _deployments(self, service: dict[str, Any]) -> list[Any]:
        selector = f"{POD_OF}={service['metadata']['name']}"
        deployments: list[Any] = self.apps.list_namespaced_deployment(
            self.grounds.namespace, label_selector=selector
        ).items
        return deployments

    def _deployment(
        self, service: dict[str, Any], name: str, own: dict[str, str], template: str
    ) -> Any:
        """Return the Deployment of a predictor, created or changed if needed."""
        predictor, meta = service["spec"]["predictor"], service["metadata"]
        labels = {POD_OF: meta["name"], **own}
        pod = {
            "metadata": {
                "labels": {**labels, **(predictor.get("labels") or {})},
                "annotations": {**_annotations(service), **(predictor.get("annotations") or {})},
            },
            "spec": {"containers": [self._container(predictor)], "terminationGracePeriodSeconds": 0,
                     "securityContext": {"runAsUser": UID}},
        }  # fmt: skip
        made = json.dumps(pod, sort_keys=True)
        body: dict[str, Any] = {
            "metadata": {
                "name": name,
                "labels": labels,
                "annotations": {"template": template, "made": made},
                "ownerReferences": [_owner(service)],
            },
            "spec": {
                "replicas": 1,
                "progressDeadlineSeconds": 600,
                "selector": {"matchLabels": labels},
                "template": pod,
            },
        }
        space = self.grounds.namespace
        try:
            existing = self.apps.read_namespaced_deployment(name, space)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return self.apps.create_namespaced_deployment(space, body)
        if (existing.metadata.annotations or {}).get("made") != made:
            return self.apps.patch_namespaced_deployment(name, space, body)
        return existing

    def _container(self, predictor: dict[str, Any]) -> dict[str, Any]:
        uri = (predictor.get("model") or {}).get("storageUri", "")
        env = {"STORAGE_URI": uri, "BUCKETS": self.grounds.environment["AWS_ENDPOINT_URL_S3"]}
        return container(env=[{"name": name, "value": value} for name, value in env.items()])

    def _address(self, service: dict[str, Any], name: str, selector: dict[str, str]) -> None:
        space, core = self.grounds.namespace, self.grounds.core
        spec = {"selector": selector, "ports": [{"port": 80, "targetPort": 8080}]}
        body = {"metadata": {"name": name, "ownerReferences": [_owner(service)]}, "spec": spec}
        try:
            core.create_namespaced_service(space, body)
        except client.ApiException as error:
            if error.status != 409:
                raise
            core.patch_namespaced_service(name, space, {"spec": {"selector": selector}})


def _annotations(service: dict[str, Any]) -> dict[str, str]:
    return dict(service["metadata"].get("annotations") or {})


def _owner(service: dict[str, Any]) -> dict[str, Any]:
    meta = service["metadata"]
    kind = {"apiVersion": service["apiVersion"], "kind": service["kind"]}
    return {**kind, "name": meta["name"], "uid": meta["uid"], "controller": True}


def _target(revision: str, percent: int, latest: bool, tag: str) -> dict[str, Any]:
    traffic = {"revisionName": revision, "percent": percent, "latestRevision": latest, "tag": tag}
    return {**traffic, "url": f"http://{tag}.example.com"}


def _of_deployment(deployment: Any) -> tuple[str, str, str]:
    """Return the readiness as PropagateRawStatus of KServe does from a Deployment."""
    status = deployment.status
    if (status.observed_generation or 0) < deployment.metadata.generation:
        return "Unknown", "Deploying", "the Deployment was not processed yet"
    conditions = {item.type: item for item in status.conditions or []}
    available = conditions.get("Available")
    if available is None or available.status == "False":
        reason = available.reason if available else "Deploying"
        return "False", reason, available.message if available else ""
    # While it is replaced the old pods still answer.
    return "True", "", ""


def _conditions(**conditions: tuple[str, str, str]) -> list[dict[str, str]]:
    worst = next((item for item in conditions.values() if item[0] != "True"), ("True", "", ""))
    return [
        {"type": name, "status": status, "reason": reason, "message": message}
        for name, (status, reason, message) in {**conditions, "Ready": worst}.items()
    ]
