import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kfp_ddp.core import step as module
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.step import step, write_job

SECRETS = {"GOOGLE_APPLICATION_CREDENTIALS": "KEY", "NETRC": "NETRC"}


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_what_a_user_can_mend_ends_the_step_in_one_line() -> None:
    @step
    def run() -> None:
        raise InputError("no such bucket")

    with pytest.raises(SystemExit, match=r"^error: no such bucket$"):
        run()


@pytest.mark.parametrize(("name", "constant"), SECRETS.items())
def test_a_mounted_secret_is_used_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, constant: str
) -> None:
    @step
    def run() -> str:
        return os.environ.get(name, "")

    mounted = tmp_path / "mounted"
    monkeypatch.setattr(module, constant, str(mounted))
    assert run() == ""
    mounted.write_text("{}")
    assert run() == str(mounted)
    monkeypatch.setenv(name, "/own")
    assert run() == "/own"


KEY = {"valueFrom": {"secretKeyRef": {"name": "secret", "key": "key"}}}
VARIABLES = [{"name": "TOKEN", "value": "s3cret"}, {"name": "KEY", **KEY}, {"name": "EMPTY"}]


@pytest.mark.parametrize(
    "job",
    [
        {"spec": {"replicas": {"Worker": {"spec": {"containers": [{"env": VARIABLES}]}}}}},
        {"spec": {"trainer": {"env": VARIABLES}}},
        {"spec": {"template": {"spec": {"initContainers": [{"name": "a", "env": VARIABLES}]}}}},
    ],
    ids=["training operator", "trainer", "init container"],
)
def test_the_record_of_a_job_has_no_value_of_a_variable(tmp_path: Path, job: Any) -> None:
    before = json.dumps(job)
    path = tmp_path / "artifacts" / "job"
    meta = {"name": "job", "managedFields": [{}]}
    write_job(SimpleNamespace(path=str(path)), {**job, "metadata": meta})
    text = path.read_text()
    assert "s3cret" not in text
    assert json.loads(text)["metadata"] == {"name": "job"}
    for kept in ("TOKEN", "secretKeyRef", "EMPTY"):
        assert kept in text
    assert json.dumps(job) == before
