"""Parts of an evaluation: slices, shares of ranks, and doubtful labels."""

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError, JobError, KfpDdpError, RunCancelledError
from kfp_ddp.core.failure import Failure
from kfp_ddp.evaluation import engine, slices
from kfp_ddp.evaluation.label_check import label_errors, near_duplicates
from kfp_ddp.evaluation.predict import EMBEDDED, FEATURES, Predictions, Share, merged, predict_share
from kfp_ddp.evaluation.request import EvaluationRequest, parse
from kfp_ddp.evaluation.results import split_digest
from kfp_ddp.jobs import local
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.local import Ended
from kfp_ddp.models.evaluation import wilson
from kfp_ddp.pictures.reading import Reading
from kfp_ddp.pictures.splits import Index, scan
from kfp_ddp.runs.workspace import RunWorkspace
from kfp_ddp.training.distributed import World
from kfp_ddp.training.model.networks import MEAN, STD, build
from kfp_ddp.training.state.checkpoint import ModelInfo
from tests.files import write

NAMES = ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2, wet.png")


def index_of(dataset: Path) -> Index:
    paths = tuple(str(dataset / "val" / name) for name in NAMES)
    return Index(dataset / "val", ("cat", "dog"), paths, (0, 0, 1, 1))


def read(dataset: Path, content: str | bytes) -> slices.Tags:
    raw = content.encode() if isinstance(content, str) else content
    (dataset / "tags.csv").write_bytes(raw)
    return slices.read("tags.csv", dataset, index_of(dataset))


def slices_of(dataset: Path, content: str | bytes) -> list[tuple[str, str, int, int]]:
    result = read(dataset, content).slices(index_of(dataset), [0, 1, 1, 1])
    assert all((one.low, one.high) == wilson(one.correct, one.samples) for one in result)
    assert all(one.accuracy == one.correct / one.samples for one in result)
    return [(one.name, one.value, one.samples, one.correct) for one in result]


def test_each_value_of_each_tag_is_a_slice(tmp_path: Path) -> None:
    table = (
        "path,site,light\n"
        "val/cat/1.png,b,night\n"
        "val/cat/2.png, a  c ,night\n"
        "val/dog/1.png,,day\n"
        '"val/dog/2, wet.png",a c,day\n'
        "train/cat/7.png,c,dusk\n"
    )
    expected = [
        ("site", "a c", 2, 1),
        ("site", "b", 1, 1),
        ("light", "day", 2, 2),
        ("light", "night", 2, 1),
    ]
    assert slices_of(tmp_path, table) == expected
    assert slices_of(tmp_path, table.replace("val/", f"{tmp_path}/val/")) == expected
    # As a spreadsheet saves it, with images named below the split.
    saved = "\ufeff" + table.replace("val/", "").replace("\n", "\r\n\r\n")
    assert slices_of(tmp_path, saved) == expected


def test_the_largest_tags_are_accepted(tmp_path: Path) -> None:
    names = [f"{number:0100}" for number in range(50)]
    tags = read(tmp_path, f"path,{','.join(names)}\ncat/1.png,{'x' * 100}{',' * 49}\n")
    assert tags.names == tuple(names)
    assert tags.values == {str(tmp_path / "val/cat/1.png"): ("x" * 100, *[""] * 49)}


def test_a_table_outside_of_the_dataset(tmp_path: Path) -> None:
    table = tmp_path / "elsewhere.csv"
    table.write_text("path,light\ncat/1.png,day\n")
    for where in (str(table), f"file://{table}"):
        tags = slices.read(where, tmp_path / "data", index_of(tmp_path / "data"))
        assert tags.names == ("light",)


def test_a_table_in_an_archive_of_the_dataset(tmp_path: Path) -> None:
    table = write(tmp_path / "tags.csv", "path,light\ncat/1.png,day\n")
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "0.tar", "w") as archive:
        archive.add(table, table.name)
    tags = slices.read("tags.csv", tmp_path / "data", index_of(tmp_path / "data"))
    assert tags.names == ("light",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "tags.csv is empty"),
        ("file,light\ncat/1.png,a\n", "tags.csv begins with 'file,light': its first line must"),
        ("path,light,light\ncat/1.png,a,b\n", "has a tag 'light': name each once"),
        ("path," + ",".join(map(str, range(51))) + "\n", "has more than 50 tags"),
        ("path,light\ncat/1.png,day,1\n", "has a tag ''"),
        ("path,light\ncat/1.png,day\ncat/1.png,night\n", "line 3: 'cat/1.png' has other tags"),
        ("path,light\nbird/1.png,day\n", "its column path needs paths such as cat/1.png"),
        ("path,light\ncat/1.png,\n", "has no image of this split"),
        ("path,li\x1bght\ncat/1.png,day\n", "tags.csv, line 1: 'li"),
        (b"path,light\ncat/1.png,\xff\n", "is not text in UTF-8"),
        ('path,light\ncat/1.png,"day\n', "tags.csv cannot be read (unexpected end of data)"),
        (f"path,light\ncat/1.png,{'x' * 101}\n", "use at most 100 printable characters"),
    ],
)
def test_an_invalid_table_is_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read(tmp_path, content)
    assert "tags.csv" in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_tag_with_more_than_200_values_is_an_error(tmp_path: Path) -> None:
    names = [f"cat/{at}.png" for at in range(201)]
    paths = tuple(str(tmp_path / "val" / name) for name in names)
    many = Index(tmp_path / "val", ("cat",), paths, (0,) * 201)
    rows = [f"{name},{at}\n" for at, name in enumerate(names)]
    (tmp_path / "tags.csv").write_text("path,id\n" + "".join(rows[:200]))
    assert len(slices.read("tags.csv", tmp_path, many).values) == 200
    (tmp_path / "tags.csv").write_text("path,id\n" + "".join(rows))
    with pytest.raises(InputError, match="the tag 'id' has more than 200 values in this split"):
        slices.read("tags.csv", tmp_path, many)


@pytest.mark.parametrize("where", ["none.csv", "folder", "../tags.csv", "", "ftp://host/tags.csv"])
def test_an_unreadable_table_is_named(tmp_path: Path, where: str) -> None:
    (tmp_path / "data" / "folder").mkdir(parents=True)
    (tmp_path / "tags.csv").write_text("path,light\ncat/1.png,day\n")
    with pytest.raises(InputError) as raised:
        slices.read(where, tmp_path / "data", index_of(tmp_path / "data"))
    assert where in str(raised.value)


def test_a_large_table_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LARGEST", 20)
    with pytest.raises(InputError, match=r"tags\.csv"):
        read(tmp_path, "path,light\ncat/1.png,day\n")


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
    request = EvaluationRequest.create(checkpoint="c", run_dir=str(run_dir), data=str(tmp_path))
    with pytest.raises(kind, match=message):
        engine.evaluate_locally(request, RunWorkspace(run_dir), 3)
    monkeypatch.setattr(local, "run_ranks", lambda *_: ended)
    with pytest.raises(RunCancelledError if kind is RunCancelledError else JobError):
        local.run_script(LaunchSpec.create(image="any", script="pass"), tmp_path)


def test_the_command_line_of_ranks_has_the_complete_request() -> None:
    request = EvaluationRequest.create(
        checkpoint="gs://models/a b/$(X)",
        of_run=False,
        run_dir="gs://runs/1/evaluate",
        data='each-node:{"source": "gs://x"}',
        split="drift",
        champion="--no flag",
        options={"tags": "tags.csv", "resamples": 10},
    )
    assert parse(request.to_argv()) == request
    for wrong in ([], ["--request"], ["--request", "{"], ["--request", json.dumps({"split": 1})]):
        with pytest.raises(InputError):
            parse(wrong)


@pytest.mark.parametrize(("field", "value"), [("split", "../a"), ("batch_size", 0), ("worst", -1)])
def test_an_invalid_input_is_named(field: str, value: Any) -> None:
    inputs = {"checkpoint": "c", "run_dir": "r", "data": "d", field: value}
    with pytest.raises(InputError, match=f"^{field}="):
        EvaluationRequest.create(**inputs)


def test_the_digest_of_a_split_is_of_all_samples_and_their_content(tmp_path: Path) -> None:
    def digest(paths: list[str], folder: str, *rows: object) -> str:
        lines = [json.dumps(row) for row in ({"format": 1}, *rows)]
        (tmp_path / "_MANIFEST.jsonl").write_text("".join(f"{line}\n" for line in lines))
        return split_digest(tmp_path, paths, folder)

    row = ["cat/1.png", 5, "00000001", "00000001", 0]
    known = digest(["1.png"], "cat", row)
    assert known
    assert digest(["cat/1.png"], "", row)
    assert digest(["1.png"], "cat", [row[0], 5, "md5-1", "00000001", 0]) not in (known, "")
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
        "top5": tally.top5,
        "calibration": tally.calibration(),
        "areas": tally.areas(),
        "features": predictions.features.tolist(),
        "sample": predictions.sample.to_csv(),
        "worst": predictions.worst(5, "loss"),
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


def test_example_by_hand() -> None:
    """The thresholds are (0.9 + 0.8 + 0.1) / 3 = 0.6 and (0.8 + 0.7 + 0.45) / 3 = 0.65.

    So 0.9 for class 1 contradicts the third label, and 0.55 for class 0 does not the last one.
    """
    first = np.array([0.9, 0.8, 0.1, 0.2, 0.3, 0.55])
    logits = np.log(np.stack([first, 1 - first, np.full(6, 1e-9)], 1))
    ((position, suggested, score),) = label_errors(logits, np.array([0, 0, 0, 1, 1, 1]))
    assert (position, suggested, round(score, 6)) == (2, 1, 0.8)


def test_changed_labels_of_separable_samples_are_first() -> None:
    draw = np.random.default_rng(0)
    targets = draw.integers(0, 5, 400)
    logits = draw.normal(size=(400, 5)) + 12 * np.eye(5)[targets]
    changed = draw.choice(400, 12, replace=False)
    given = targets.copy()
    given[changed] = (given[changed] + 1) % 5
    doubtful = label_errors(logits, given)
    scores = [score for _, _, score in doubtful]
    assert scores == sorted(scores, reverse=True)
    assert {position for position, _, _ in doubtful} == set(changed.tolist())
    assert all(suggested == targets[position] for position, suggested, _ in doubtful)


def test_near_duplicates_are_of_two_kinds_and_agree_in_embedding_and_pixels() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(8, FEATURES, generator=draw)
    features[1] = features[0]
    features[3, :EMBEDDED] = features[2, :EMBEDDED]
    features[5, EMBEDDED:] = features[4, EMBEDDED:]
    features[7] = features[6]
    kinds = torch.tensor([[0, 0], [1, 0], [0, 0], [1, 1], [0, 0], [1, 1], [0, 0], [0, 0]])
    ((one, other, score),) = near_duplicates(features, kinds)
    assert (one, other) == (0, 1)
    assert score > 0.999
