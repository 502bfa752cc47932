"""The components that launch anything offer the settings of a job, with its defaults and names."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.components.mpi_job.component import mpi_job
from kfp_ddp.components.pytorch_job.component import pytorch_job
from kfp_ddp.components.shared.launch.manifests.specification import LaunchSpec
from kfp_ddp.components.tf_job.component import tf_job
from kfp_ddp.components.train_job.component import train_job

COMPONENTS = {"pytorchjob": pytorch_job, "trainjob": train_job, "tfjob": tf_job, "mpijob": mpi_job}
OF_THE_STEP = {"run_id", "task_name", "task_id", "work_dir", "job", "task_config"}
# What comes from the task, by dsl.TaskConfig, or is the component itself.
FROM_THE_TASK = {"kind", "resources", "env_vars", "volumes", "volume_mounts", "tolerations"}
FROM_THE_TASK |= {"affinity"}


@pytest.mark.parametrize("kind", list(COMPONENTS))
def test_inputs_are_settings_of_that_kind_with_their_defaults(kind: str) -> None:
    given = {name: each.default for name, each in parameters(kind).items()}
    settings = {name: given[name] for name in given.keys() - OF_THE_STEP}
    assert settings.keys() <= LaunchSpec.model_fields.keys() - FROM_THE_TASK
    plain = {**settings, "image": "a:1", "kind": kind}
    spec = LaunchSpec.create(**plain)
    standard = LaunchSpec.create(image="a:1", kind=kind)
    assert spec == standard


@pytest.mark.parametrize("kind", list(COMPONENTS))
def test_every_input_reaches_the_job(kind: str) -> None:
    """A name that the signature has and the body drops would be a setting that does nothing."""
    body = inspect.getsource(COMPONENTS[kind].python_func).split('"""')[2]
    for name in parameters(kind):
        assert re.search(rf'("{name}": {name},|\b{name}={name},)', body), name


@pytest.mark.parametrize("kind", list(COMPONENTS))
def test_the_readme_has_a_line_for_each_input(kind: str) -> None:
    module = inspect.getfile(COMPONENTS[kind].python_func)
    text = Path(module).with_name("README.md").read_text()
    listed = [name for row in re.findall(r"^\| (`\w+`.*?) \|", text, re.M) for name in row.split()]
    names = {name.strip("`,") for name in listed}
    inputs = parameters(kind).keys() - {"job", "task_config"}
    assert inputs <= names
    assert names - inputs <= {"Output", "job"}


def parameters(kind: str) -> dict[str, Any]:
    return dict(inspect.signature(COMPONENTS[kind].python_func).parameters)
