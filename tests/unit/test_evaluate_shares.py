"""The request of an evaluation, its ranks, and the predictions of several as of one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.evaluation import engine
from kfp_ddp.evaluation.predict import Predictions, Share, merged, predict_share
from kfp_ddp.evaluation.request import Request
from kfp_ddp.evaluation.results import split_digest
from kfp_ddp.jobs.local import Ended
from kfp_ddp.training.checkpoint import ModelInfo
from kfp_ddp.training.config import Reading
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model import MEAN, STD, build
from kfp_ddp.training.splits import Index, scan
from tests.files import write


@pytest.mark.parametrize(
    ("ended", "failure", "kind", "message"),
    [
        (Ended(2), Failure(2, 1, "5.png is torn: replace it", False), InputError, "5.png is torn"),
        (Ended(1), Failure(1, 1, "no room", False), JobError, "failed: rank 1: no room"),
        (Ended(137), Failure(137, 0, "ended by SIGKILL", True), JobError, "rank 0: ended by SIGK"),
        (Ended(1, None, "Segfault"), None, JobError, "failed: exit code 1: Segfault"),
        (Ended(143), None, RunCancelledError, "was stopped"),
        (Ended(0, 15), None, RunCancelledError, "was stopped"),
    ],
)
def test_the_error_is_the_first_failure_of_a_rank(
    ended: Ended,
    failure: Failure | None,
    kind: type[KfpDdpError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "run" / "evaluation"
    write(target / "evaluation.json", "of an earlier attempt")

    def run_ranks(flags: list[str], ranks: int, folder: Path, program: str) -> Ended:
        """Write the record of the launcher, without processes."""
        assert not (target / "evaluation.json").exists()
        assert (ranks, folder) == (3, target)
        (folder / "logs").mkdir()
        if failure is not None:
            (folder / "logs" / "failure.json").write_text(failure.to_json())
        return ended

    monkeypatch.setattr(engine, "run_ranks", run_ranks)
    request = Request.create(checkpoint="c", run_dir=str(run_dir), data="d")
    with pytest.raises(kind, match=message):
        engine.run_local_ranks(request, 3)


def test_the_command_line_of_ranks_has_the_complete_request() -> None:
    request = Request.create(
        checkpoint="gs://models/a b/$(X)",
        of_run=False,
        run_dir="gs://runs/1/evaluate",
        data='each-node:{"source": "gs://x"}',
        split="drift",
        champion="--no flag",
        options={"tags": "tags.csv", "resamples": 10},
    )
    assert Request.parse(request.to_argv()) == request
    for wrong in ([], ["--request"], ["--request", "{"], ["--request", json.dumps({"split": 1})]):
        with pytest.raises(InputError):
            Request.parse(wrong)


@pytest.mark.parametrize(
    ("field", "value"), [("split", "../train"), ("batch_size", 0), ("worst", -1)]
)
def test_an_invalid_input_is_named(field: str, value: Any) -> None:
    inputs = {"checkpoint": "c", "run_dir": "r", "data": "d", field: value}
    with pytest.raises(InputError, match=f"^{field}="):
        Request.create(**inputs)


def test_the_digest_of_a_split_is_of_all_samples_and_their_content(tmp_path: Path) -> None:
    def digest(paths: list[str], folder: str, *rows: object) -> str:
        lines = [json.dumps(row) for row in ({"format": 1}, *rows)]
        (tmp_path / "_MANIFEST.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return split_digest(tmp_path, paths, folder)

    row = ["cat/1.png", 5, "00000001", "00000001", 0]
    known = digest(["1.png"], "cat", row)
    assert known
    assert digest(["cat/1.png"], "", row)
    assert digest(["1.png"], "cat", [row[0], 5, "00000001", "00000002", 0]) not in (known, "")
    assert digest(["1.png", "2.png"], "cat", row) == digest(["1.png"], "", row) == ""
    (tmp_path / "_MANIFEST.jsonl").unlink()
    assert split_digest(tmp_path, ["1.png"], "cat") == ""


CLASSES = tuple(f"class{number}" for number in range(7))
CPU = torch.device("cpu")
INFO = ModelInfo("cifar_resnet8", CLASSES, 8, MEAN, STD, 1, {})


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """Return 47 images of noise in seven classes, one of which is small."""
    folder, draw = tmp_path_factory.mktemp("split"), torch.Generator().manual_seed(3)
    for number in range(47):
        name = CLASSES[number % 7 if number > 6 else 0]
        (folder / name).mkdir(exist_ok=True)
        pixels = torch.randint(0, 256, (8, 8, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    return scan(folder, CLASSES)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    torch.manual_seed(5)
    return build("cifar_resnet8", len(CLASSES)).eval()


def shares(network: Any, index: Index, world: int, size: int, bad: str = "fail") -> list[Share]:
    return [
        predict_share(network, INFO, index, size, World(rank, world, 0, world, CPU), Reading(bad))
        for rank in range(world)
    ]


def figures(predictions: Predictions) -> dict[str, Any]:
    tally = predictions.tally
    return {
        "csv": predictions.to_csv(),
        "paths": predictions.index.paths,
        "skipped": predictions.skipped,
        "confusion": tally.confusion.tolist(),
        "loss": tally.loss,
        "losses": predictions.loss.tolist(),
        "top5": tally.top5,
        "calibration": tally.calibration(),
        "areas": tally.areas(),
        "features": predictions.features.tolist(),
        "worst": predictions.worst(5, predictions.loss),
    }


@pytest.mark.parametrize("world", [2, 3, 16])
@pytest.mark.parametrize("size", [1, 5, 64])
def test_results_are_equal_on_all_ranks(network: Any, index: Index, world: int, size: int) -> None:
    """With up to 16 ranks, which are more than batches."""
    single = merged(index, shares(network, index, 1, size))
    assert single.tally.samples == len(index) == 47
    parts = shares(network, index, world, size)
    assert sum(len(share.positions) for share in parts) == 47
    assert figures(merged(index, parts)) == figures(single)
    assert figures(merged(index, parts[::-1])) == figures(single)


def test_any_number_of_ranks_skips_unreadable(network: Any, index: Index, tmp_path: Path) -> None:
    paths = (*index.paths[:9], str(index.root / "class1" / "bad.png"), *index.paths[10:])
    damaged = Index(index.root, index.classes, paths, index.targets)
    single = merged(damaged, shares(network, damaged, 1, 4, "skip"), "skip")
    assert single.skipped == ("class1/bad.png",)
    parts = merged(damaged, shares(network, damaged, 3, 4, "skip"), "skip")
    assert figures(parts) == figures(single)
    with pytest.raises(InputError, match=r"bad\.png"):
        shares(network, damaged, 3, 4)
    write(tmp_path / "class0" / "1.png", b"no image")
    unreadable = scan(tmp_path, CLASSES)
    with pytest.raises(InputError, match="none of the 1 images"):
        merged(unreadable, shares(network, unreadable, 2, 4, "skip"), "skip")


def test_a_share_that_is_missing_or_counted_twice_is_an_error(network: Any, index: Index) -> None:
    first, second, third = shares(network, index, 3, 5)
    for wrong in ([first, second], [first, second, third, second]):
        with pytest.raises(RuntimeError, match="of 47 samples"):
            merged(index, wrong)


def test_a_network_without_linear_layer_is_evaluated(index: Index) -> None:
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool3d((1, 1, 7)), torch.nn.Flatten())
    assert merged(index, shares(network.eval(), index, 1, 5)).tally.samples == len(index)
