"""A run's files on a claim, brought here by a pod that is gone afterwards."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from kfp_ddp.client.run.run_files import open_claim
from kfp_ddp.core.errors import KfpDdpError
from kfp_ddp.k8s.api import Api
from tests.e2e.harness import step_pod
from tests.e2e.harness.grounds import IMAGE, Grounds, claim, until
from tests.e2e.harness.namespace import WORK, namespace
from tests.e2e.harness.rights import act_as

RUN = "0f9e7c1a-1111-4222-8333-444455556666"
SIZE = 5 << 20


@pytest.fixture(scope="module")
def grounds(cluster: client.ApiClient) -> Iterator[Grounds]:
    """A namespace with a claim on which a run left a bundle of 5 MiB."""
    with namespace(cluster) as ground:
        claim(ground, WORK)
        folder = f"/work/{RUN}/train"
        script = (
            f"mkdir -p {folder}/bundle {folder}/.leases && echo '{{}}' > {folder}/metrics.jsonl "
            f"&& head -c {SIZE} /dev/urandom > {folder}/bundle/model && touch {folder}/.leases/a"
        )
        step_pod.run(ground, "writer", ["sh", "-c", script], work=WORK)
        yield ground


def phase(grounds: Grounds, pod: str) -> str:
    """That of a pod."""
    return str(grounds.core.read_namespaced_pod(pod, grounds.namespace).status.phase)


def readers(grounds: Grounds) -> list[str]:
    """Pods that read for somebody."""
    pods = grounds.core.list_namespaced_pod(grounds.namespace, label_selector="kfp-ddp/reads")
    return [item.metadata.name for item in pods.items]


@pytest.mark.smoke
def test_download_is_complete_and_its_pod_is_deleted(grounds: Grounds, tmp_path: Path) -> None:
    with open_claim(Api.connect(grounds.namespace), WORK, IMAGE) as read:
        files = read(RUN)
        assert files.sizes() == {"train/metrics.jsonl": 3, "train/bundle/model": SIZE}
        files.fetch(["train/bundle/model"], tmp_path)
        assert len(readers(grounds)) == 1
    assert (tmp_path / "train/bundle/model").stat().st_size == SIZE
    assert readers(grounds) == []


def test_pod_of_a_download_is_deleted_after_sigterm(grounds: Grounds) -> None:
    program = (
        "import time; from kfp_ddp.client.run.run_files import open_claim\n"
        "from kfp_ddp.k8s.api import Api\n"
        f"with open_claim(Api.connect({grounds.namespace!r}), {WORK!r}, {IMAGE!r}):\n"
        "    print('reads', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout as error:
        assert error.readline() == b"reads\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 143
    assert readers(grounds) == []


def test_download_from_a_missing_pvc_fails_immediately(grounds: Grounds) -> None:
    began = time.monotonic()
    with (
        pytest.raises(KfpDdpError, match="claim nowhere does not exist"),
        open_claim(Api.connect(grounds.namespace), "nowhere", IMAGE),
    ):
        pass
    assert time.monotonic() - began < 60
    assert readers(grounds) == []


def test_read_write_once_pvc_is_read_on_its_node(grounds: Grounds) -> None:
    claim(grounds, "one-node", mode="ReadWriteOnce")
    program = f"mkdir -p /work/{RUN}/train && touch /work/{RUN}/train/metrics.jsonl && sleep 600"
    trains = step_pod.bare("trains", ["sh", "-c", program], work="one-node")
    grounds.core.create_namespaced_pod(grounds.namespace, trains)
    until(lambda: phase(grounds, "trains") == "Running", "the one that trains")
    with open_claim(Api.connect(grounds.namespace), "one-node", IMAGE) as read:
        until(lambda: "train/metrics.jsonl" in read(RUN).sizes(), "the file")
        (name,) = readers(grounds)
        reader = grounds.core.read_namespaced_pod(name, grounds.namespace)
        node = grounds.core.read_namespaced_pod("trains", grounds.namespace).spec.node_name
    assert reader.spec.node_name == node
    chosen = f"involvedObject.name={name},reason=Scheduled"  # which of several nodes it might be
    events = grounds.core.list_namespaced_event(grounds.namespace, field_selector=chosen)
    assert events.items == []


def test_download_without_the_right_to_create_pods(grounds: Grounds) -> None:
    with (
        act_as(grounds.api, grounds.namespace, "default") as nobody,
        pytest.raises(KfpDdpError) as caught,
        open_claim(Api(nobody, grounds.namespace), WORK, IMAGE),
    ):
        pass
    assert f"no right to list pods in namespace {grounds.namespace}" in str(caught.value)
