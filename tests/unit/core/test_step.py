import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_origin, get_type_hints

import pytest

from kfp_ddp.core import outputs
from kfp_ddp.core import step as module
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.outputs import EvaluateFigures, StepOutputs
from kfp_ddp.core.step import step, write_job
from kfp_ddp.models.evaluation import figures_for


def test_error_of_a_user_ends_the_step_with_one_line() -> None:
    @step
    def run() -> None:
        raise InputError("no such bucket")

    with pytest.raises(SystemExit, match=r"^error: no such bucket$"):
        run()


def test_mounted_secret_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @step
    def run() -> dict[str, str]:
        return dict(os.environ)

    names = ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL_S3", "GOOGLE_APPLICATION_CREDENTIALS", "NETRC")
    for name in (*names, "PYTHONPATH"):
        monkeypatch.setenv(name, "")  # so that what the step sets is removed after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(module, "SECRET", str(tmp_path / "secret"))
    before = run()
    assert before.keys() & set(names) == set()
    (tmp_path / "secret").mkdir()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL_S3", "PYTHONPATH", "key.json", "netrc"):
        (tmp_path / "secret" / name).write_text(f"{name} of the secret\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "own")
    monkeypatch.setenv("NETRC", "/own")
    assert {name: text for name, text in run().items() if before.get(name) != text} == {
        "AWS_ACCESS_KEY_ID": "AWS_ACCESS_KEY_ID of the secret",
        "AWS_ENDPOINT_URL_S3": "own",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "secret" / "key.json"),
        "NETRC": "/own",
    }


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
def test_job_artifact_has_no_values_of_variables(tmp_path: Path, job: Any) -> None:
    before = json.dumps(job)
    path = tmp_path / "artifacts" / "job"
    meta = {"name": "job", "managedFields": [{}]}
    write_job(SimpleNamespace(path=str(path), metadata={}), {**job, "metadata": meta})
    text = path.read_text()
    assert "s3cret" not in text
    assert json.loads(text)["metadata"] == {"name": "job"}
    for name in ("TOKEN", "secretKeyRef", "EMPTY"):
        assert name in text
    assert json.dumps(job) == before


READ = [one for one in vars(outputs).values() if isinstance(one, StepOutputs)]


@pytest.mark.parametrize("one", READ, ids=lambda one: one.step)
def test_component_returns_the_parameters_that_are_read(one: StepOutputs[Any]) -> None:
    name = one.step.replace("-", "_")
    component = getattr(importlib.import_module(f"kfp_ddp.components.{name}.component"), name)
    hints = get_type_hints(one.form, include_extras=True)
    parameters = {key for key, hint in hints.items() if get_origin(hint) is Annotated}
    assert parameters <= {*(component.component_spec.outputs or ())}


def test_metrics_of_the_evaluation_have_the_figures_that_are_read() -> None:
    assert {*EvaluateFigures.__annotations__} <= {one.name for one in figures_for("kfp")}
