"""Check the settings that a pipeline gives to our components as constants, when it is compiled."""

from typing import Any

from kfp_ddp.core.settings import Settings, split
from kfp_ddp.datasets.settings import SyncSettings
from kfp_ddp.datasets.volume.request import VolumeOptions
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring
from kfp_ddp.jobs.launch_spec import LaunchSpec, Supervision
from kfp_ddp.plan.form import SUBJECTS

MODELS: dict[str, tuple[type[Settings], ...]] = {
    "train.job": (LaunchSpec, Supervision),
    "tune.job": (LaunchSpec, Supervision),
    "job.settings": (LaunchSpec,),
    "data_sync.options": (SyncSettings,),
    "dataset_volume.options": (VolumeOptions,),
    "evaluate.options": (Measuring,),
    "gate.rules": (Rules,),
    "predict.options": SUBJECTS["prediction"],
}
"""Models of an input that is no mapping of the form, or takes a part of it."""
CHANNEL = "pipelinechannel--"


def check_constants(component: str, task: Any, spec: Any) -> None:
    """Raise InputError for a name in a mapping that its setting does not have.

    Seen are the constants of the task, and the defaults of the pipeline's form.
    """
    form = spec.root.input_definitions.parameters
    for name, given in task.inputs.parameters.items():
        mapping = given.runtime_value.constant.struct_value
        of_form = given.component_input_parameter.removeprefix(CHANNEL)
        if of_form in form:
            mapping = form[of_form].default_value.struct_value
        if models := MODELS.get(f"{component}.{name}", SUBJECTS.get(name)):
            subject = f"{name} of {task.task_info.name} in {spec.pipeline_info.name}"
            split(subject, mapping.fields, *models)
