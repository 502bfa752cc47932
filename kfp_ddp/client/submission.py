"""A run as it will be asked for: checked here first, since the server takes 1.5 for an int."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.pipelines import find_pipeline, find_version, spec_of
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.settings import hint
from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.compiled import Images
from kfp_ddp.pipelines.document import Document, of_api, parsed, read
from kfp_ddp.pipelines.form import COMPILED, Form, check_arguments, named_after

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Run


@dataclass(frozen=True)
class Version:
    """A pipeline that the server has."""

    pipeline_id: str
    version_id: str
    name: str
    """The pipeline's and the version's."""


@dataclass(frozen=True)
class Submission:
    """What will be sent, and the pipeline that it is of."""

    pipeline: Document
    version: Version | None
    """Where the server has the pipeline; else it is sent whole."""
    name: str
    experiment: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pipeline_root: str = ""
    service_account: str = ""

    def document(self) -> dict[str, Any]:
        """As people read it."""
        return {
            "name": self.name,
            "experiment": self.experiment,
            "pipeline": self.version.name if self.version else self.pipeline.name,
            "parameters": dict(self.arguments),
            **{
                name: value
                for name, value in asdict(self).items()
                if name in ("pipeline_root", "service_account") and value
            },
        }

    def send(self, client: "kfp.Client") -> "V2beta1Run":
        """Start the run.

        Raises:
            RefusedError: the server refuses it.
            ServerError: there is no answer.
        """
        from kfp_server_api import V2beta1PipelineVersionReference, V2beta1Run, V2beta1RuntimeConfig

        experiment = client.create_experiment(self.experiment)
        version = self.version and V2beta1PipelineVersionReference(
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
        return client._run_api.run_service_create_run(run=run)


def ours(name: str, images: Images = Images()) -> Document | None:  # noqa: B008  a tuple
    """A pipeline of ours by its name, written with - or _; None for another."""
    file = COMPILED / f"{name.replace('-', '_')}.yaml"
    if file.stem not in NAMES:
        return None
    images.check()
    return parsed(images.put_into(file.read_text(encoding="utf-8")), str(file))


def of_file(file: str) -> Document:
    """The pipeline of a file.

    Raises:
        InputError: it is none.
    """
    return read(Path(file))


def of_server(client: "kfp.Client", name: str) -> tuple[Document, Version]:
    """The newest version of a pipeline that the server has, or the one named after an @.

    Raises:
        InputError: there is no such pipeline or version.
    """
    called, _, wanted = name.partition("@")
    found, own = find_pipeline(client, called), ours(called)
    if found is None and own:
        called = own.name  # that of train_resnet is train-resnet
        found = find_pipeline(client, called)
        if found is None:
            raise InputError(
                f"the server has no pipeline {called!r} yet: kfp-ddp upload {called} brings it"
            )
    if found is None:
        near = hint(called, NAMES) or f", which are {', '.join(NAMES)}"
        raise InputError(
            f"the server has no pipeline {called!r}, and it is none of ours{near}; "
            "kfp-ddp upload brings a file there"
        )
    version = find_version(client, found, wanted)
    title = f"{called}@{version.display_name}"
    spec = spec_of(client, found.pipeline_id, version.pipeline_version_id)
    ids = Version(found.pipeline_id, version.pipeline_version_id, title)
    return of_api(spec, title), ids


def arguments(
    pipeline: Document, file: Path | None, words: Sequence[str], boxes: Mapping[str, Any]
) -> dict[str, Any]:
    """What the run is given, as preflight will find it good.

    Args:
        pipeline: Whose form it fills.
        file: A YAML file of settings; None for none.
        words: Settings as key=value, over those of the file.
        boxes: Parameters by name that the file and the words leave open, with options of their own.

    Raises:
        InputError: what cannot be used, in one line.
    """
    form = Form(pipeline)
    given = form.read(file, words)
    left = {name: value for name, value in boxes.items() if name not in given}
    given = form.completed({**form.check(left.items()), **given})
    check(pipeline, given)
    return given


def check(pipeline: Document, given: Mapping[str, Any]) -> None:
    """Check arguments as the run will, and that its pods can read the source.

    Raises:
        InputError: what preflight would refuse.
    """
    if inputs := check_arguments(pipeline, given):
        _check_reach(inputs["source"])


def _check_reach(source: str) -> None:
    """Refuse a folder of this machine, which no pod can read.

    Raises:
        InputError: naming what to do.
    """
    place = source.removeprefix("file://")
    if "://" not in place and (Path(place).exists() or not place.startswith("/")):
        raise InputError(
            f"source={source!r} is a folder of this machine, which a cluster cannot read: copy it "
            "to a bucket, or train here with --local"
        )


def name_of_a_run(pipeline: Document, given: Mapping[str, Any]) -> str:
    """The name of a run that is given none: its model, source or pipeline, and the time."""
    source = str(given.get("source", ""))
    subject = str(given.get("model_name") or (source and named_after(source)) or pipeline.name)
    return f"{subject[:40]}-{datetime.now():%Y%m%d-%H%M%S}"
