"""One rank of an evaluation: model, samples, and the champion on the same samples."""

import platform
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kfp_ddp.core import machine
from kfp_ddp.core.errors import InputError, StorageError, UnavailableError, writing
from kfp_ddp.core.folders import is_remote
from kfp_ddp.core.log import log
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.evaluation import results, slices
from kfp_ddp.evaluation.predict import Predictions, Share, merged, predict_share
from kfp_ddp.evaluation.request import EvaluationRequest
from kfp_ddp.models import champion as champions
from kfp_ddp.models import weights, weights_download
from kfp_ddp.models.bundle import CONFIG, LARGEST_CONFIG, Bundle
from kfp_ddp.models.champion import Champion
from kfp_ddp.models.evaluation import CHAMPION_FOLDER, PREDICTIONS, Evaluation
from kfp_ddp.models.signature import Signer
from kfp_ddp.models.signature import check as check_signature
from kfp_ddp.pictures.sides import TEST, TRAIN
from kfp_ddp.pictures.splits import Index, sides_of
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training import trained
from kfp_ddp.training.distributed import World, alone, gpu_or_cpu
from kfp_ddp.training.prepare import with_splits
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.manifest import MANIFEST, read_manifest
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model

MOST_TRAINED = 10_000
"""Maximum training images to read in addition: less than a short training reads in an epoch."""
_FILES = 20
"""Names of unreadable images in a record."""


class Subject(NamedTuple):
    """A model in eval mode on the CPU, with URI and digest of its checkpoint."""

    network: nn.Module
    info: ModelInfo
    uri: str
    digest: str


class Measured(NamedTuple):
    """Predictions on a split, and their record."""

    predictions: Predictions
    result: Evaluation


class Evaluator:
    """Evaluates together with the other ranks; results are on the first rank only."""

    def __init__(
        self,
        request: EvaluationRequest,
        checkpoint: Path | str,
        world: World | None,
        signer: Signer | None = None,
    ) -> None:
        """Read the model and list the samples; no `world` means a single process.

        A model that CHAMPION names must be signed by `signer`.
        """
        self.request = request
        self.dataset = Path(request.data)
        self.world = world or alone(gpu_or_cpu())
        if request.options.network:
            checkpoint = self.world.from_first(lambda: import_weights(request))
        self.subject = read_model(checkpoint, signer)
        self.info = self.subject.info
        self.index, self.others = sides_of(
            self.dataset, request.split, self.info.classes, self.info.config
        )
        tags = request.options.tags
        self.tags = slices.read(tags, self.dataset, self.index) if tags else None

    def split(self, started: float) -> Measured | None:
        """Evaluate the model on the requested split; `started` is on the monotonic clock."""
        return self._measure(self.subject, self.index, self.request.split, started, self.tags)

    def test(self) -> Measured | None:
        """Evaluate the model on the split test, if that is evaluated with val."""
        if TEST not in self.others:
            return None
        return self._measure(self.subject, self.others[TEST], TEST, time.monotonic())

    def training(self) -> tuple[Predictions | None, str]:
        """Read the training images to compare them with others; also return why they are not."""
        index = self.others.get(TRAIN)
        if index is None:
            return None, ""
        if len(index) > MOST_TRAINED:
            return None, f"they are more than {MOST_TRAINED:,}"
        network = self.subject.network
        size = self.request.batch_size
        reading = self.info.reading._replace(on_bad_image="skip")
        share: Share | str
        try:
            share = predict_share(network, self.info, index, size, self.world, reading)
        except InputError as error:
            share = str(error)  # the other ranks wait for this one
        good: list[Share] = []
        for one in self.world.to_first(share) or ():
            if isinstance(one, str):
                return None, one
            good.append(one)
        try:
            return merged(index, good, "skip") if good else None, ""
        except InputError as error:
            return None, str(error)

    def re_evaluate_champion(self, champion: Champion, first: Measured | None) -> Evaluation | None:
        """Evaluate the champion on the samples of `first` if its own evaluation is of others.

        The samples are those of the champion's classes that the challenger could read. None if the
        champion is already comparable or cannot be evaluated; the gate reports which.
        """
        own = champion.bundle.digest
        digest, index = self.world.from_first(
            lambda: (own, first and _common_samples(champion, *first))
        )
        if digest != own:
            raise UnavailableError(f"the champion {champion.uri} has changed: run again")
        if not index:
            return None
        started = time.monotonic()
        subject = _read_bundle(champion, champion.uri)
        number = {name: position for position, name in enumerate(subject.info.classes)}
        targets = tuple(number[index.classes[target]] for target in index.targets)
        index = replace(index, classes=subject.info.classes, targets=targets)
        measured = self._measure(subject, index, self.request.split, started)
        if measured is None or first is None:
            return None
        known = {"skipped": first.result.skipped, "bundle_digest": own}
        result = measured.result.model_copy(update=known)
        target = self.request.target / CHAMPION_FOLDER
        rows = measured.predictions.to_csv()
        results.write(target, target.parents[1], result, {PREDICTIONS: rows})
        return result

    def _measure(
        self,
        subject: Subject,
        index: Index,
        split: str,
        started: float,
        tags: slices.Tags | None = None,
    ) -> Measured | None:
        info = subject.info
        own = subject is self.subject
        reading = info.reading
        if not own:  # the evaluated model read all of these images, so none may be unreadable
            values = reading.value_range or self.info.reading.value_range
            background = reading.background
            reading = self.info.reading._replace(
                on_bad_image="fail", background=background, value_range=values
            )
        size = self.request.batch_size
        device = self.world.device
        share = predict_share(subject.network, info, index, size, self.world, reading)
        shares = self.world.to_first(share)
        if shares is None:
            return None
        predictions = merged(index, shares, reading.on_bad_image)
        if skipped := predictions.skipped:
            log.info(
                f"{len(skipped)} unreadable images are left out, as in training with "
                f"on_bad_image=skip; the first: {skipped[0]}"
            )
        kind = f"{machine.cpus():g} CPUs, {platform.machine()}"
        if device.type == "cuda":
            kind = torch.cuda.get_device_name(device)
        result = results.summarise(
            predictions,
            info,
            dataset=self.dataset,
            split=split,
            tags=tags,
            resamples=self.request.options.resamples if own else 0,
            checkpoint=subject.uri,
            checkpoint_digest=subject.digest,
            skipped_files=list(skipped[:_FILES]),
            device=device.type,
            world_size=self.world.size,
            hardware=f"{self.world.size} x {kind}",
            written=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        seconds = {"seconds": time.monotonic() - started}
        return Measured(predictions, result.model_copy(update=seconds))


def import_weights(request: EvaluationRequest) -> Path:
    """Write weights of a network of the user's own as a checkpoint of the run, and return it.

    Raise InputError if network, weights and classes do not fit, StorageError without space.
    """
    run = RunFolder(request.run_dir)
    places = {"data": request.data, "output_dir": request.run_dir}
    config = TrainConfig.create(**{**request.options.network, **places})
    file = Path(request.checkpoint)
    if is_remote(request.checkpoint):
        file = weights_download.download(request.checkpoint, run.initial_weights)
    network, classes = trained.load(
        config, file, request.options.classes, lambda: with_splits(config)[1].train.classes
    )
    with writing(run.checkpoints, results.ADVICE):
        return trained.save(network, config, classes, run.checkpoints)


def read_model(checkpoint: Path | str, signer: Signer | None = None) -> Subject:
    """Return a model and the digest of its checkpoint, a folder step-<number>.

    As text it may also be a URI, a bundle, or the folder of a model's exports, which means the
    champion, signed by `signer`. Raise InputError if it is missing, damaged or not signed,
    StorageError if it cannot be read.
    """
    uri = str(checkpoint)
    if isinstance(checkpoint, Path):
        return _read_checkpoint(checkpoint, uri)
    store = open_store(uri)
    champion = champions.find(uri) if store.has_files() else None
    if champion is None and (Path(checkpoint) / MANIFEST).is_file():
        return _read_checkpoint(Path(checkpoint), uri)
    if champion is None and store.read(MANIFEST, LARGEST_CONFIG) is not None:
        with tempfile.TemporaryDirectory() as folder:
            return _read_checkpoint(weights_download.download(uri, Path(folder)), uri)
    champion = _with_bundle(champion, uri, "checkpoint and no bundle")
    if champion.bundle.model:
        check_signature(champion.bundle, signer)
    return _read_bundle(champion, uri)


def read_bundle(
    uri: str, signer: Signer | None = None, *, allow_code: bool
) -> tuple[Subject, Bundle]:
    """Return the model of a bundle or of a model's exports, and the bundle, signed by `signer`.

    Raise as `read_model`, and InputError for a network of its own code without `allow_code`.
    """
    champion = _with_bundle(champions.find(uri, signer=signer), uri, "bundle")
    return _read_bundle(champion, uri, allow_code=allow_code), champion.bundle


def _with_bundle(champion: Champion | None, uri: str, what: str) -> Champion:
    """Return a champion that has a bundle; raise InputError for another."""
    if champion is None or not champion.version:
        raise InputError(
            f"there is no {what} at {uri}: give a bundle, the folder of a model's exports, or, to "
            "evaluate, a folder step-<number> of a run, or with model a file of its weights"
        )
    return champion


def _read_bundle(champion: Champion, uri: str, *, allow_code: bool = True) -> Subject:
    """Return the model of a bundle, as `read_model` does."""
    bundle = champion.bundle
    with tempfile.TemporaryDirectory() as folder:
        file = champion.fetch_weights(Path(folder))
        try:
            network, info = weights.read(file, champion.evaluation.step, allow_code=allow_code)
        except (InputError, StorageError) as error:
            raise type(error)(f"the champion {bundle.uri} cannot be evaluated: {error}") from None
    # The settings of the training define the images of the validation, and how they are read.
    config = {**mapping_in(bundle.read(CONFIG, LARGEST_CONFIG)).get("training", {}), **info.config}
    return Subject(
        network, replace(info, config=config), uri, champion.evaluation.checkpoint_digest
    )


def _read_checkpoint(path: Path, uri: str) -> Subject:
    return Subject(*load_model(path), uri, read_manifest(path).digest)


def _common_samples(
    champion: Champion, predictions: Predictions, challenger: Evaluation
) -> Index | None:
    own = champion.evaluation
    index = predictions.index
    if own.same_samples(challenger) or not champion.version:
        return None
    classes = {one.name for one in own.classes}
    known = [at for at, target in enumerate(index.targets) if index.classes[target] in classes]
    return index.only(known) if known else None
