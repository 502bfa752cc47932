from typing import Any

from kfp_ddp import __version__
from kfp_ddp.k8s import images

TRAINER = "registry.example/team/trainer:1.0"
OLD, NEW = "sha256:" + "0" * 64, "sha256:" + "1" * 64


def pod(name: str, image_id: str, container: str = "pytorch") -> dict[str, Any]:
    """A pod with a container of ours and a sidecar."""
    ids = {container: image_id, "istio-proxy": "istio@" + "sha256:" + "2" * 64}
    return {
        "metadata": {"name": name},
        "spec": {"containers": [{"name": each, "image": TRAINER} for each in ids]},
        "status": {
            "containerStatuses": [{"name": each, "imageID": found} for each, found in ids.items()]
        },
    }


def test_image_is_recorded_by_name_and_digest() -> None:
    for said in (NEW, f"registry.example/team/trainer@{NEW}", f"docker-pullable://trainer@{NEW}"):
        assert images.used([pod("w-0", said)], ("pytorch",)) == [{"image": TRAINER, "digest": NEW}]


def test_moved_tag_is_two_images() -> None:
    found = images.used([pod("w-0", OLD), pod("w-1", NEW), pod("w-2", OLD)], ("pytorch",))
    assert [each["digest"] for each in found] == [OLD, NEW]


def test_pod_that_never_started_has_no_image() -> None:
    waiting = {**pod("w-0", OLD), "status": {"phase": "Pending"}}
    assert images.used([waiting, pod("w-1", ""), {**waiting, "status": {}}], ("pytorch",)) == []


def test_record_outside_of_a_pod_has_the_version() -> None:
    record = images.record([pod("w-0", NEW)], ("pytorch",))
    assert record["version"] == __version__
    assert record["step"] == []
    assert record["workers"] == [{"image": TRAINER, "digest": NEW}]
