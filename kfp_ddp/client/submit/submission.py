"""Runs to submit, checked here first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kfp_ddp.client.kfp.pipelines import PipelineVersion, content_name, find_pipeline, find_version
from kfp_ddp.core.container_images import Images
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.secrets import check_secrets
from kfp_ddp.core.settings import hint
from kfp_ddp.models.weights_download import is_path
from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.document import Document, from_api, parsed
from kfp_ddp.pipelines.form import COMPILED, Form, Word, check_arguments, named_after
from kfp_ddp.plan.sweep import number_of

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from kfp_ddp.client.kfp.compat import Client


@dataclass(frozen=True)
class Submission:
    """A run to submit."""

    pipeline: Document
    version: PipelineVersion | None
    """None to send the pipeline itself."""
    name: str
    experiment: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pipeline_root: str = ""
    service_account: str = ""

    def document(self) -> dict[str, Any]:
        """Return the run as a document."""
        document: dict[str, Any] = {
            "name": self.name,
            "experiment": self.experiment,
            "pipeline": self.version.title if self.version else self.pipeline.name,
            "parameters": dict(self.arguments),
        }
        if self.pipeline_root:
            document["pipeline_root"] = self.pipeline_root
        if self.service_account:
            document["service_account"] = self.service_account
        return document

    def preview(self) -> dict[str, Any]:
        """Return the document with what will run: defaults, too, and images."""
        from kfp_ddp.checks.preflight import title

        document = self.document()
        if self.version:
            document["version"] = self.version.title
        else:
            document["version"] = content_name(self.pipeline, self.pipeline.name)
        run = check_arguments(self.pipeline, self.arguments)
        if run:
            form = run.parameters
            gpus = "all GPUs" if run.inputs["gpus_per_node"] == -1 else "no GPU"
            gate = run.gate
            if "min_accuracy" not in gate:  # then the gate compares with the commonest class
                gate = {"majority_class": "must be beaten", **gate}
            document |= {
                "runs": title(run, gpus),
                "source": form.source,
                "destination": form.destination or "none: the bundle stays in the run",
                "gate": gate,
                "champion": run.champion or "none",
            }
            if run.sweep:
                document["trials"] = number_of(run.sweep)
        return {**document, "images": self.pipeline.images()}

    def send(self, client: "Client") -> "V2beta1Run":
        """Submit the run."""
        from kfp_server_api import V2beta1PipelineVersionReference, V2beta1Run, V2beta1RuntimeConfig

        experiment = client.create_experiment(self.experiment)
        version = None
        if self.version:
            version = V2beta1PipelineVersionReference(
                pipeline_id=self.version.pipeline_id, pipeline_version_id=self.version.version_id
            )
        run = V2beta1Run(
            experiment_id=experiment.experiment_id,
            display_name=self.name,
            pipeline_spec=None if version else self.pipeline.body(),
            pipeline_version_reference=version,
            runtime_config=V2beta1RuntimeConfig(
                parameters=dict(self.arguments), pipeline_root=self.pipeline_root or None
            ),
            service_account=self.service_account or None,
        )
        return client.run_service.run_service_create_run(run=run)


def built_in(name: str, images: Images = Images()) -> Document | None:  # noqa: B008  a tuple
    """Return a built-in pipeline by its name, written with - or _; None for another."""
    file = COMPILED / f"{name.replace('-', '_')}.yaml"
    if file.stem not in NAMES:
        return None
    return parsed(images.put_into(file.read_text(encoding="utf-8")), str(file))


def near(name: str) -> str:
    """Return the built-in pipeline that is meant, or all, for the end of an error."""
    return hint(name, NAMES) or f", which are {', '.join(NAMES)}"


def uploaded(client: "Client", name: str) -> tuple[Document, PipelineVersion]:
    """Return a pipeline of the server by NAME, its newest version, or NAME@VERSION."""
    pipeline_name, _, version_name = name.partition("@")
    pipeline = find_pipeline(client, pipeline_name)
    compiled = built_in(pipeline_name)
    if pipeline is None and compiled:
        pipeline_name = compiled.name  # that of train_resnet is train-resnet
        pipeline = find_pipeline(client, pipeline_name)
    if pipeline is None:
        if compiled:
            why = f" yet: upload it by kfp-ddp upload {pipeline_name}"
        else:
            why = f", and it is not built in{near(pipeline_name)}; kfp-ddp upload uploads a file"
        raise InputError(f"the server has no pipeline {pipeline_name!r}{why}")
    version = find_version(client, pipeline, version_name)
    if version is None:
        which = f"version {version_name!r}" if version_name else "version"
        raise InputError(f"pipeline {pipeline_name!r} has no {which} on the server")
    answer = client.get_pipeline_version(version.pipeline_id, version.version_id)
    spec = answer.pipeline_spec
    if not isinstance(spec, Mapping):
        spec = {}
    return from_api(spec, version.title), version


class Inputs(NamedTuple):
    """Settings of a run: `words` override `flags`, and both those of the file."""

    words: Sequence[Word] = ()
    file: Path | None = None
    flags: Mapping[str, tuple[str, Any]] = {}
    """By the name of an argument: its parameter and value; '' or None if not set."""


def arguments(pipeline: Document, inputs: Inputs, configured: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked arguments of a run; all inputs override what is `configured`."""
    form = Form(pipeline)
    words, texts = _with_flags(pipeline, inputs)
    # A mapping or a list is checked below, when it is parsed.
    plain = {name: text for name, text in texts if str(text)[:1] not in ("{", "[")}
    check_secrets(plain)
    settings = form.read(inputs.file, words)
    boxes = {
        name: value for name, value in configured.items() if value and name in pipeline.parameters
    }
    check_secrets({**boxes, **settings})
    defaults = {name: value for name, value in boxes.items() if name not in settings}
    checked = form.check(defaults.items())
    settings = {**checked, **settings}
    form.check_complete(settings)
    check(pipeline, settings)
    return settings


def _with_flags(
    pipeline: Document, inputs: Inputs
) -> tuple[Sequence[Word], Sequence[tuple[str, Any]]]:
    """Return the words of a run after those of its flags, as they are and as pairs."""
    words = list(inputs.words)
    texts = [_pair(word) for word in words]
    own = {"SOURCE": Form(pipeline).read(inputs.file, ())}  # other flags override the file
    for flag, (name, value) in inputs.flags.items():
        if value in (None, ""):
            continue
        if name not in pipeline.parameters:
            raise InputError(f"{flag} cannot be used: {pipeline.name} has no parameter {name}")
        before = {**dict(texts), **own.get(flag, {})}
        if name in before and name != "destination":  # its option has a configured default
            raise InputError(f"{name} cannot be set too: it is the argument {flag}")
        texts.insert(0, (name, value))
        words.insert(0, f"{name}={value}")
    return words, texts


def _pair(word: Word) -> tuple[str, Any]:
    """Return the key and the value of a setting; '' for a text without a value."""
    if isinstance(word, str):
        name, _, text = word.partition("=")
        return name, text
    return word


def check(pipeline: Document, settings: Mapping[str, Any]) -> None:
    """Check arguments as the run's preflight will, and that its pods can read what they name."""
    Form(pipeline).check_places(settings)
    run = check_arguments(pipeline, settings)
    if not run:
        return
    for config in (run.config, *run.trials):
        pretrained = config.pretrained
        if is_path(pretrained) and not _is_on_pvc(pretrained):
            raise InputError(
                f"pretrained={pretrained} is no address, nor a path on a PVC, and a cluster cannot "
                "read files of this machine: copy the file to a bucket and give its address, or "
                "auto, true or false; or train here with --local"
            )


def _is_on_pvc(path: str) -> bool:
    """Return whether a path may be on a PVC: absolute, and not of this machine."""
    return path.startswith("/") and not Path(path).exists()


def default_name(pipeline: Document, settings: Mapping[str, Any]) -> str:
    """Return the name of a run without one: its model, source or pipeline, and the time."""
    source = str(settings.get("source", ""))
    dataset = named_after(source) if source else ""
    subject = str(settings.get("model_name") or dataset or pipeline.name)
    now = datetime.now()
    return f"{subject[:40]}-{now:%Y%m%d-%H%M%S}"
