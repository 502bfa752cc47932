"""Compile pipelines to YAML, and compare the committed files with their sources."""

import copy
import importlib
import importlib.util
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Value
from kfp import compiler, dsl
from kfp.dsl.graph_component import GraphComponent
from kfp.dsl.structures import ResourceSpec
from kfp.pipeline_spec.pipeline_spec_pb2 import ParameterType

from kfp_ddp import __version__
from kfp_ddp.core.container_images import REGISTRY, Images
from kfp_ddp.core.errors import InputError, KfpDdpError
from kfp_ddp.core.settings import Settings, split
from kfp_ddp.core.text import one_line, yaml_of
from kfp_ddp.datasets.settings import SyncSettings
from kfp_ddp.datasets.volume.request import VolumeOptions
from kfp_ddp.evaluation.gate.rules import Rules
from kfp_ddp.evaluation.request import Measuring
from kfp_ddp.jobs.launch_spec import LaunchSpec, Supervision
from kfp_ddp.jobs.shipping.own_package import USER, map_name, started
from kfp_ddp.jobs.shipping.worker_start import FOLDER
from kfp_ddp.pipelines import MODULES, NAMES
from kfp_ddp.pipelines.document import SUFFIXES
from kfp_ddp.plan.form import SUBJECTS, choices

# kfp.local only runs commands that name KFP's executor.
PROGRAM = ["python3", "-m", "kfp_ddp.components", "kfp.dsl.executor_main"]
PUBLIC = Images()
NEEDS = f"Its namespace needs kfp-ddp install of version {__version__}."
# What our steps have for the pods of their jobs.
PASSED = (dsl.TaskConfigField.ENV, dsl.TaskConfigField.KUBERNETES_VOLUMES)


def built_in(names: Sequence[str] = NAMES) -> dict[str, Any]:
    """Return our pipelines by name, with what KFP supports and its SDK cannot declare."""
    pipelines = {}
    for name in names:
        module = importlib.import_module(f"kfp_ddp.pipelines.{MODULES[name]}")
        pipeline = getattr(module, name)
        _offer_choices(pipeline.pipeline_spec.root)
        for component in pipeline.pipeline_spec.components.values():
            _pass_to_jobs(component)
        pipelines[name] = pipeline
    return pipelines


def _offer_choices(root: Any) -> None:
    """List the choices of each parameter of the form, which KFP's UI shows."""
    for name, parameter in root.input_definitions.parameters.items():
        del parameter.literals[:]
        parameter.literals.extend(Value(string_value=choice) for choice in choices(name))


def _pass_to_jobs(component: Any) -> None:
    """Let a step that creates jobs have what their pods need, and nothing else."""
    fields = component.task_config_passthroughs
    # The step itself keeps resources: KFP passes them through without applying them.
    passed = [field for field in fields if field.field in PASSED]
    if passed:
        del fields[:]
        fields.extend(passed)
        component.input_definitions.parameters.pop("image", None)  # it is in the plan's job


def write(
    pipelines: Mapping[str, Any], directory: Path, images: Images = PUBLIC, restricted: bool = False
) -> list[Path]:
    """Compile pipelines to `<directory>/<name>.yaml` for these images, or raise InputError.

    `restricted` is for namespaces under PodSecurity `restricted`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, pipeline in pipelines.items():
        path = directory / f"{name}.yaml"
        adapted = copy.deepcopy(pipeline)  # another call may be for other images
        try:
            _adapt_steps(adapted, restricted)
            compiler.Compiler().compile(adapted, package_path=str(path))
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{name} cannot be compiled: {one_line(error, 2000)}") from error
        path.write_text(images.put_into(path.read_text()))
        paths.append(path)
    return paths


def _adapt_steps(pipeline: Any, restricted: bool) -> None:
    """Start our components from an image or the ConfigMap, without what their steps do not need.

    Ours run as a user other than root; `restricted` refuses root for all others. Argo holds both
    parts of a step six times in the Workflow, and KFP's API no longer updates the tasks of a run
    whose Workflow is near 1 MB. The pipeline's form stays.
    """
    spec = pipeline.pipeline_spec
    platform = pipeline.platform_spec.platforms["kubernetes"].deployment_spec.executors
    tasks_of = _tasks_by_component(spec)
    for name, component in spec.components.items():
        label = component.executor_label
        if not label:
            continue  # a part of the pipeline, such as an exit handler's
        executor = spec.deployment_spec["executors"][label]
        if _is_ours(executor):
            for task in tasks_of[name]:
                check_constants(component_of(executor), task, spec)
            _say_needs(spec.pipeline_info)
            _start_program(executor["container"], platform[label])
            _drop_descriptions(component)
            _drop_inputs(component, tasks_of[name])
        elif restricted:
            platform[label].update({"securityContext": {"runAsNonRoot": True}})


def _tasks_by_component(spec: Any) -> dict[str, list[Any]]:
    tasks_of: dict[str, list[Any]] = {}
    for group in (spec.root, *spec.components.values()):
        for task in group.dag.tasks.values():
            tasks_of.setdefault(task.component_ref.name, []).append(task)
    return tasks_of


def _say_needs(info: Any) -> None:
    if NEEDS not in info.description:
        info.description = f"{info.description} {NEEDS}".strip()


def _start_program(container: Any, platform: Any) -> None:
    """Start the program of a step of ours, as a user other than root, with our source mounted."""
    lock = "trainer" if "/trainer:" in container["image"] else "launcher"
    container.update({"command": started(PROGRAM, lock)})
    constant = {"runtimeValue": {"constant": map_name()}}
    platform.get_or_create_list("configMapAsVolume").append(
        {"configMapNameParameter": constant, "mountPath": FOLDER, "optional": True}
    )
    for mount in platform.fields.get("pvcMount", Value()).list_value.values:
        mount.struct_value.fields.pop("componentInputParameter", None)  # of an older KFP
    platform.update({"securityContext": {"runAsUser": str(USER), "runAsNonRoot": True}})


def _drop_descriptions(component: Any) -> None:
    for side in (component.input_definitions, component.output_definitions):
        for definition in (*side.parameters.values(), *side.artifacts.values()):
            definition.description = ""
        for artifact in side.artifacts.values():
            artifact.artifact_type.schema_version = ""


def _drop_inputs(component: Any, tasks: Sequence[Any]) -> None:
    """Drop the optional inputs that no task gives, and the defaults of those that all give."""
    parameters = component.input_definitions.parameters
    for task in tasks:
        # Limits that are outputs: the container names their channels, KFP reads no copies.
        for stale in {*task.inputs.parameters} & {*vars(ResourceSpec())}:
            del task.inputs.parameters[stale]
    for parameter, definition in [*parameters.items()]:
        given = [parameter in task.inputs.parameters for task in tasks]
        if all(given):
            definition.ClearField("default_value")
            definition.is_optional = False
        elif definition.is_optional and not any(given) and not _is_needed(definition):
            del parameters[parameter]


def _is_needed(definition: Any) -> bool:
    """Return whether KFP fills an input that no task gives: an image, or a job's settings."""
    image = definition.default_value.string_value.startswith(REGISTRY)
    return bool(image or definition.parameter_type == ParameterType.TASK_CONFIG)


def component_of(executor: Any) -> str:
    """Return the function of an executor with a container, which is its last argument."""
    arguments = executor["container"]["args"]
    return str(arguments[len(arguments) - 1])


def _is_ours(executor: Any) -> bool:
    """Return whether an executor runs the source of a component of ours."""
    if "container" not in executor or "args" not in executor["container"]:
        return False
    container = executor["container"]
    name = component_of(executor)
    try:
        module = importlib.import_module(f"kfp_ddp.components.{name}.component")
    except ImportError:
        return False
    ours = getattr(module, name).component_spec.implementation.container
    return bool(ours.command == list(container["command"]))


def differences(
    pipelines: Mapping[str, Any], directory: Path, images: Images = PUBLIC, restricted: bool = False
) -> list[str]:
    """Return a line for each pipeline whose file in `directory` is missing or stale."""
    lines = []
    with tempfile.TemporaryDirectory() as fresh:
        for path in write(pipelines, Path(fresh), images, restricted):
            committed = directory / path.name
            if not committed.exists():
                lines.append(f"{committed}: missing")
            elif _documents(committed) != _documents(path):
                lines.append(f"{committed}: differs from its source")
    return lines


def orphans(directory: Path) -> list[str]:
    """Return a line for each file in `directory` that none of our pipelines has."""
    files = {path.stem for path in directory.glob("*") if path.suffix in SUFFIXES}
    names = files - set(NAMES)
    return [f"{directory / name}.yaml: has no pipeline" for name in sorted(names)]


def _documents(path: Path) -> list[Any]:
    """Return the YAML documents of a file, with the SDK's version masked."""
    try:
        documents: list[Any] = yaml_of(path.read_text(), several=True)
    except InputError:
        return []
    for document in documents:
        if isinstance(document, dict) and "sdkVersion" in document:
            document["sdkVersion"] = "masked"
    return documents


def pipelines_of(file: Path) -> dict[str, Any]:
    """Execute a Python file and return its pipelines by function name; raise InputError."""
    name = f"kfp_ddp_own_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        raise InputError(f"{file} is not a Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    # As for `python FILE`: modules in its folder can be imported.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module
    try:
        module_spec.loader.exec_module(module)
    except KfpDdpError as error:
        raise InputError(f"{_place(file, error)}: {error}") from error
    except (Exception, SystemExit) as error:
        reason = error.msg if isinstance(error, SyntaxError) else one_line(error)
        raise InputError(f"{_place(file, error)}: {type(error).__name__}: {reason}") from error
    finally:
        sys.path.pop(0)
    pipelines = {
        function: value for function, value in vars(module).items() if _is_defined_in(name, value)
    }
    if not pipelines:
        raise InputError(f"{file} defines no pipeline: decorate a function with @dsl.pipeline")
    return pipelines


def _is_defined_in(module: str, value: Any) -> bool:
    """Return whether a value is a pipeline of this module, and not one that it imports."""
    return isinstance(value, GraphComponent) and value.pipeline_func.__module__ == module


def _place(file: Path, error: BaseException) -> str:
    """Return the file, and the line in it that raised the error."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            line = frame.lineno  # the innermost one is the last
    return f"{file}, line {line}" if line else str(file)


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
