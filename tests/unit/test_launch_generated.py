"""Jobs of all kinds from specifications made by chance: what holds for every pod of every one."""

import json
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.utils import parse_quantity

from kfp_ddp.core.step import write_job
from kfp_ddp.jobs.identity import identify, metadata
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s.quantity import amount
from tests.launch_specs import quantity, specification
from tests.unit.test_launch_pods import templates

CASES = 150


def generated(kind: str) -> list[tuple[LaunchSpec, dict[str, Any], dict[str, str]]]:
    """Specifications, the jobs that they make, and the labels of these jobs."""
    chance = random.Random(kind)
    found = []
    for _ in range(CASES):
        spec = specification(chance, kind)
        meta = metadata(spec, identify("run", "train", "7", spec), "space", 0, None)
        found.append((spec, spec.job_kind.manifest(spec, meta), meta["labels"]))
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_pod_is_known_held_back_and_within_a_quota(kind: str) -> None:
    for spec, job, labels in generated(kind):
        ours = {key: value for key, value in labels.items() if key.startswith("kfp-ddp/")}
        given = {"cpu": spec.cpu or not spec.cpu_request}
        given["memory"] = spec.memory or not spec.memory_request
        for role, template in templates(job["spec"]).items():
            pod, (container,) = template["spec"], template["spec"]["containers"]
            assert template["metadata"]["labels"].items() >= ours.items()
            security = container["securityContext"]
            assert security["capabilities"]["drop"] == ["ALL"]
            assert security["allowPrivilegeEscalation"] is False
            if kind == "trainjob":
                whole = [job["spec"]["trainer"]["resourcesPerNode"]]
            else:
                whole = [container["resources"]]
                whole += [each["resources"] for each in pod.get("initContainers", [])]
                token = not spec.service_account and role != "Launcher"
                assert (pod.get("automountServiceAccountToken") is False) == token
            for each in whole:
                for name in ("cpu", "memory"):
                    assert name in each["requests"]
                    assert name in each.get("limits", {}) or not given[name]


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_value_of_a_variable_reaches_the_record_of_any_job(kind: str, tmp_path: Path) -> None:
    chance, path = random.Random(kind), tmp_path / "job"
    for _ in range(CASES):
        spec = specification(chance, kind)
        secret = f"{chance.getrandbits(64):x}"
        env = {**spec.env, "SECRET": f"a {secret} b"}
        spec = LaunchSpec.create(**{**spec.given(), "env": env})
        meta = metadata(spec, identify("run", "train", "7", spec), "space", 0, None)
        write_job(SimpleNamespace(path=str(path)), spec.job_kind.manifest(spec, meta))
        assert secret not in path.read_text()
        assert json.loads(path.read_text())["metadata"] == meta


def test_a_quantity_is_as_much_as_kubernetes_own_client_says() -> None:
    chance = random.Random(11)
    for _ in range(2000):
        text = quantity(chance)
        assert amount(text) == Fraction(parse_quantity(text)), text
