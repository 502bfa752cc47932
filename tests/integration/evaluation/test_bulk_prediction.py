"""Batch prediction: one row for each object, resumed to the shard, the same as an evaluation."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import google_crc32c
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from kfp import dsl
from PIL import Image

from kfp_ddp.components.predict.component import predict as component
from kfp_ddp.core.errors import InputError, StorageError, UnavailableError
from kfp_ddp.core.spreadsheet import Reader, write_for_excel
from kfp_ddp.evaluation import bulk_rank
from kfp_ddp.evaluation import predict as evaluation
from kfp_ddp.evaluation.bulk import LOST, PROBABILITY, Table
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models import signature, weights
from kfp_ddp.models.evaluation import prediction_rows
from kfp_ddp.pictures.splits import scan
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.folder_source import FolderReader
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.source import Changed, Entry
from kfp_ddp.training.data.loader import pixel_format
from kfp_ddp.training.distributed import alone, autocast
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model
from tests.commands import call, document, output, refused
from tests.evaluations import Trained, written
from tests.files import forged
from tests.tolerance import converted, near


@pytest.fixture(scope="session")
def bundle(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The files of a bundle that are read, with its real weights and what they compute of val."""
    folder = tmp_path_factory.mktemp("bulk") / "bundle"
    folder.mkdir()
    network, info = load_model(trained_checkpoint)
    val, world = scan(trained_dataset / "val", info.classes), alone(torch.device("cpu"))
    share = evaluation.predict_share(network.eval(), info, val, 8, world)
    (folder / bundles.REFERENCE).write_text(share.sample.to_csv())
    return sealed(folder, network, info)


def sealed(folder: Path, network: torch.nn.Module, info: ModelInfo, wrong: int = 0) -> Path:
    written(folder, wrong, "metrics.json")
    (folder / "config.json").write_text(json.dumps({"training": info.config}))
    weights.write(network, info, folder / bundles.WEIGHTS)
    bundles.seal(folder)
    return folder


@pytest.fixture
def source(trained: Trained, tmp_path: Path) -> Path:
    """48 images, a broken and an empty one, text, a system's file, and unusual names."""
    folder = Path(shutil.copytree(trained.dataset / "val", tmp_path / "source"))
    one = folder / "red" / "000.png"
    for name in ("=1+1.png", "a,;=2'b'.PNG", "_DSC1.JPG", "none"):
        shutil.copy(one, folder / name)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "empty.png").write_bytes(b"")
    (folder / "notes.txt").write_text("text")
    (folder / ".DS_Store").write_bytes(b"\0")
    return folder


def predict(source: Path | str, bundle: Path, table: Path | str, **options: Any) -> dict[str, Any]:
    options = {"batch_size": 8, "shard_images": 10, **options}
    request = PredictionRequest.from_inputs(str(source), str(bundle), str(table), options)
    bulk_rank.predict_share(request)
    return Table(str(table)).read_record()


def rows_of(table: Path) -> dict[str, dict[str, Any]]:
    if table.suffix == ".parquet":
        rows = pq.read_table(table).to_pylist()
    else:
        with table.open(encoding="utf-8", newline="") as file:
            rows = list(Reader(file))
    by_name = {row["name"]: row for row in rows}
    assert len(by_name) == len(rows), "one row for each object"
    return by_name


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_one_row_for_each_object_as_evaluated(
    source: Path, bundle: Path, trained: Trained, suffix: str
) -> None:
    table = source / f"table{suffix}"
    summary = predict(source, bundle, table)
    rows = rows_of(table)
    beside = {f"table{suffix}{end}" for end in ("", ".json", ".sample")}
    ours = {"table.csv", "table.parquet", ".DS_Store", *beside}
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert rows.keys() == names - ours
    assert sorted(n for n in rows if rows[n]["reason"]) == ["broken.jpg", "empty.png", "notes.txt"]
    assert (summary["rows"], summary["computed"], summary["unreadable"]) == (55, 55, 3)
    trained.evaluate()
    predictions = prediction_rows((trained.evaluation.parent / "predictions.csv").read_bytes())
    for one in predictions:
        row = rows[one["path"] or ""]
        assert (row["class"], row["bundle"]) == (one["predicted"], summary["bundle"])
        sure = float(row[f"probability_{row['class']}"])
        assert sure == near(float(one["confidence"] or 0))
    answers = {name: row["sure"] for name, row in rows.items()}
    assert {name for name in rows if not answers[name]} == {"broken.jpg", "empty.png", "notes.txt"}
    below = [one for one in answers if "/" in one and answers[one] == "no"]
    assert 1 <= len(below) <= 3  # 5 % of what the bundle was evaluated on have less energy
    assert summary["unsure"] == list(answers.values()).count("no")
    assert sum(summary["classes"].values()) == 52
    assert not list(source.glob("*.parts/*"))


@pytest.mark.parametrize(("fastest", "used"), [("bf16", "bf16"), ("fp16", "fp32")])
def test_precision_is_that_of_the_device_unless_it_is_set(
    source: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, fastest: str, used: str
) -> None:
    noted, of_pixels = mock.Mock(side_effect=autocast), mock.Mock(side_effect=pixel_format)
    monkeypatch.setattr(evaluation, "autocast", noted)
    monkeypatch.setattr(evaluation, "pixel_format", of_pixels)
    monkeypatch.setattr(bulk_rank, "half_precision", lambda *_: fastest)
    for precision in ("auto", "fp32", "bf16"):
        predict(source / "blue", bundle, source.parent / f"{precision}.csv", precision=precision)
        expected = used if precision == "auto" else precision
        assert {one.args[1] for one in noted.mock_calls} == {expected}
        assert of_pixels.call_args.args[0] == noted.call_args.args[1]
        noted.reset_mock()


def test_only_what_is_new_or_changed_is_computed(
    source: Path, bundle: Path, trained: Trained
) -> None:
    table = source.parent / "out" / "table.parquet"
    first = predict(source, bundle, table)
    before, content = rows_of(table), table.read_bytes()
    assert predict(source, bundle, table)["computed"] == 0
    assert table.read_bytes() == content
    shutil.copy(source / "green" / "000.png", source / "new.png")
    shutil.copy(source / "blue" / "000.png", source / "broken.jpg")
    (source / "red" / "001.png").unlink()
    assert predict(source, bundle, table)["computed"] == 2
    rows = rows_of(table)
    assert rows.keys() == before.keys() ^ {"new.png", "red/001.png"}
    assert rows["broken.jpg"]["class"] == rows["blue/000.png"]["class"]
    assert {name for name in rows if rows[name] != before.get(name)} == {"new.png", "broken.jpg"}
    assert {row["bundle"] for row in rows.values()} == {first["bundle"]}

    network, info = load_model(trained.checkpoint)
    other = sealed(source.parent / "other", network, info, 7)
    again = predict(source, other, table)
    assert again["computed"] == 55
    assert {row["bundle"] for row in rows_of(table).values()} == {again["bundle"]}
    assert again["bundle"] != first["bundle"]
    renamed = dataclasses.replace(info, classes=("a", "b", "c"))
    with pytest.raises(InputError, match=r"other columns .*probability_a"):
        predict(source, sealed(source.parent / "third", network, renamed), table)
    assert Table(str(table)).read_record() == again


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_rows_of_an_earlier_version_without_sure_stay(
    source: Path, bundle: Path, tmp_path: Path, suffix: str
) -> None:
    table = tmp_path / f"table{suffix}"
    predict(source, bundle, table)
    before = rows_of(table)
    rows = [
        {name: value for name, value in row.items() if name != "sure"} for row in before.values()
    ]
    if suffix == ".csv":
        with table.open("w", encoding="utf-8", newline="") as file:
            write_for_excel(file, [list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        pq.write_table(pq.read_table(table).drop_columns(["sure"]), table)
    compared = tmp_path / f"table{suffix}.sample"
    head, *lines = compared.read_text().splitlines()
    head = head.replace('"confidence","energy"', '"0","1","2"')
    compared.write_text("\n".join([head, *(f"{line},7" for line in lines)]))
    shutil.copy(source / "green" / "000.png", source / "new.png")
    summary = predict(source, bundle, table)
    assert (summary["computed"], summary["drift"]["images"]) == (1, 53)
    after = rows_of(table)
    assert after.pop("new.png")["sure"] == before["green/000.png"]["sure"] != ""
    assert after == {name: row | {"sure": ""} for name, row in before.items()}


@pytest.mark.parametrize(("shard_images", "more"), [(10, 0), (7, 1)])
def test_a_run_resumes_at_the_shard(
    source: Path,
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_images: int,
    more: int,
) -> None:
    """To the same bytes in the same shards; other shards and objects have other batches."""
    table, parts = tmp_path / "table.csv", list[str]()
    put = Folder._put

    def failing(store: Folder, content: BinaryIO, name: str) -> bool:
        if name.endswith(".csv"):
            if len(parts) == 3:
                raise UnavailableError("the store is gone")
            parts.append(name)
        return put(store, content, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_put", failing)
        with pytest.raises(UnavailableError):
            predict(source, bundle, table)
    assert not table.exists()
    for number in range(more):
        shutil.copy(source / "red" / "000.png", source / f"between-{number}.png")
    assert predict(source, bundle, table, shard_images=shard_images)["computed"] == 25 + more
    predict(source, bundle, tmp_path / "at-once.csv")
    if not more:
        assert table.read_text() == (tmp_path / "at-once.csv").read_text()
    assert len(rows_of(table)) == 55 + more
    resumed, at_once = (rows_of(one).values() for one in (table, tmp_path / "at-once.csv"))
    assert converted(resumed, PROBABILITY, float) == converted(at_once, PROBABILITY, near)


def test_the_record_is_of_the_whole_table(
    source: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in source.glob("*/*.png"):
        with Image.open(path) as image:
            image.point(lambda value: value // 2).save(path)
    table, put = tmp_path / "table.csv", Folder._put

    def failing(store: Folder, content: BinaryIO, name: str) -> bool:
        if name.endswith("-0000004.csv"):
            raise UnavailableError("the store is gone")
        return put(store, content, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "_put", failing)
        with pytest.raises(UnavailableError):
            predict(source, bundle, table)
    expected = predict(source, bundle, tmp_path / "at-once.csv")["drift"]
    assert expected["differs"]
    resumed, retried = predict(source, bundle, table), predict(source, bundle, table)
    assert (resumed["computed"], retried["computed"]) == (15, 0)
    assert retried["drift"] == resumed["drift"]
    for name in ("images", "reference", "distance"):
        assert resumed["drift"][name] == pytest.approx(expected[name], rel=1e-3)
    (source / "red" / "000.png").unlink()
    shutil.copy(source / "none", source / "new.png")
    later = predict(source, bundle, table)
    assert (later["drift"]["differs"], later["drift"]["images"]) == (True, expected["images"])
    assert later["drift_of_new"]["images"] == 1


def test_objects_of_names_that_no_sync_takes_are_counted(source: Path, bundle: Path) -> None:
    one, table = source / "red" / "000.png", source / "t.csv"
    for name in (b"0\r=HYPERLINK(1).png", b"no\xff.png", b"\x1b[2J.png", b"line\n.png"):
        shutil.copy(one, source / os.fsdecode(name))
    summary = predict(source, bundle, table)
    assert sum(summary["left_out"].values()) == 4
    assert (summary["rows"], len(rows_of(table))) == (55, 55)
    assert predict(source, bundle, table)["computed"] == 0


def columns_of(table: Path) -> list[str]:
    with table.open(encoding="utf-8", newline="") as file:
        return Reader(file).columns


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_hostile_file_among_the_parts_is_left_out(
    source: Path, bundle: Path, tmp_path: Path, suffix: str
) -> None:
    predict(source, bundle, tmp_path / "first.csv")
    table, columns = tmp_path / f"t{suffix}", columns_of(tmp_path / "first.csv")
    parts = tmp_path / f"t{suffix}.parts"
    parts.mkdir()
    head = ",".join(columns)
    contents = {
        "long": head.encode() + b"\n" + b"x" * 200_000,
        "nul": b"\0" * 1000,
        "no-text": head.encode() + b"\n\xff\xfe,b\n",
        "short": head.encode() + b"\nz\n",
        "quote": head.encode() + b'\n"',
        "column": b"a\n1\n",
    }
    for number, content in enumerate(contents.values()):
        for at, end in enumerate((suffix, f"{suffix}.sample")):
            (parts / f"{number:012x}-{at:07}{end}").write_bytes(content)
    (parts / f"other{suffix}").write_bytes(b"\xff")
    arrow = pyarrow.table({name: [1, 2] for name in columns})
    pq.write_table(arrow, parts / f"{'a' * 12}-0000000.parquet")
    pq.write_table(arrow.slice(0, 0), parts / f"{'b' * 12}-0000000.parquet")
    os.mkfifo(parts / f"{'c' * 12}-0000000{suffix}")
    summary = predict(source, bundle, table)
    assert (summary["computed"], len(rows_of(table))) == (55, 55)
    assert summary["drift"]["images"] == 52
    assert not parts.exists() or not any(parts.iterdir())


def test_a_forged_object_is_computed_again(source: Path, bundle: Path, tmp_path: Path) -> None:
    table, image, other = tmp_path / "t.csv", source / "red/000.png", source / "blue/000.png"
    size = max(image.stat().st_size, other.stat().st_size) + 4
    image.write_bytes(image.read_bytes().ljust(size, b"\0"))
    predict(source, bundle, table)
    crc = google_crc32c.value(image.read_bytes())
    image.write_bytes(forged(other.read_bytes().ljust(size - 4, b"\0"), crc))
    assert google_crc32c.value(image.read_bytes()) == crc
    assert predict(source, bundle, table)["computed"] == 1
    assert rows_of(table)["red/000.png"]["class"] == "blue"


def test_an_object_that_cannot_be_downloaded_is_tried_again(
    source: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pour = FolderReader.pour

    async def failing(self: FolderReader, entry: Entry, *more: Any) -> None:
        if entry.name == "red/003.png":
            raise errors.pop(0)
        await pour(self, entry, *more)

    table, archived = tmp_path / "table.parquet", InputError("it is in an archive")
    with monkeypatch.context() as patch:
        patch.setattr(FolderReader, "pour", failing)
        for last in (UnavailableError("the store is gone"), Changed("red/003.png")):
            errors: list[Exception] = [archived, last]
            with pytest.raises(UnavailableError):
                predict(source, bundle, tmp_path / "gone.csv")
        errors = [archived, archived]
        assert predict(source, bundle, table)["unreadable"] == 4
    assert rows_of(table)["red/003.png"]["reason"] == f"{LOST}it is in an archive"
    record = predict(source, bundle, table)
    assert (record["computed"], record["unreadable"], record["rows"]) == (1, 3, 55)


@pytest.mark.parametrize(
    ("table", "file", "words"),
    [
        ("table.csv", "a/notes.txt", r"no images .*1 \.txt"),
        ("table.csv", "../file", "holds no files"),
        ("file/table.csv", "a.png", "cannot write"),
        ("foreign.csv", "a.png", "other columns"),
        ("foreign.parquet", "a.png", "ArrowInvalid"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_computed(
    tmp_path: Path, bundle: Path, table: str, file: str, words: str
) -> None:
    (tmp_path / "source" / "a").mkdir(parents=True)
    for name in (f"source/{file}", "file", "foreign.csv", "foreign.parquet"):
        (tmp_path / name).write_text("name,price\na,1\n")
    with pytest.raises((InputError, StorageError), match=words) as refused:
        predict(tmp_path / "source", bundle, tmp_path / table)
    assert "\n" not in str(refused.value)


def test_bundle_table_and_settings_are_checked_before_a_run(tmp_path: Path) -> None:
    for table, options, words in (
        ("gs://abc/t.json", {}, "ends in neither"),
        ("gs://abc/.csv", {}, "ends in neither"),
        ("gs://abc/t.csv/", {}, "ends in neither"),
        ("gs://abc/t.csv", {"batch_size": 0}, "batch_size"),
        ("gs://abc/t.csv", {"device": "cpu"}, "the step sets itself"),
    ):
        with pytest.raises(InputError, match=words):
            PredictionRequest.from_inputs("gs://abc/new", "gs://abc/model", table, options)
    with pytest.raises(InputError, match="no bundle"):
        predict(tmp_path, tmp_path, tmp_path / "t.csv")


def test_ranks_of_the_step_write_the_same_table_to_a_bucket(
    source: Path, bundle: Path, tmp_path: Path, emulator: Any
) -> None:
    store = open_store("gs://models/new")
    for path in filter(Path.is_file, source.rglob("*")):
        store.put(path, path.relative_to(source).as_posix())
    record = tmp_path / "record"
    table, rows, unreadable = component.python_func(
        source="gs://models/new",
        bundle=str(bundle),
        table="gs://models/new/table.csv",
        options={"batch_size": 8, "shard_images": 10},
        job={"nproc_per_node": 2},
        prediction_metrics=dsl.Metrics(name="m", uri=str(tmp_path / "m")),
        prediction_record=dsl.Artifact(name="r", uri=str(record)),
    )
    result = json.loads(record.read_text())
    assert (rows, unreadable, result["computed"]) == (55, 3, 55)
    drift = result["drift"]
    assert (drift["differs"], drift["images"], drift["reference"]) == (False, 52, 48)
    assert not store.has_files("table.csv.parts/")
    (tmp_path / "together.csv").write_bytes(store.read("table.csv", 1 << 20) or b"")
    predict(source, bundle, tmp_path / "alone.csv")
    tables = (rows_of(tmp_path / f"{name}.csv") for name in ("together", "alone"))
    together, alone = ({name: row["class"] for name, row in rows.items()} for rows in tables)
    assert together == alone
    again = predict("gs://models/new", bundle, table)
    assert (again["computed"], again["drift"]) == (0, drift)


def test_images_are_compared_with_those_of_the_evaluation(
    source: Path, bundle: Path, tmp_path: Path
) -> None:
    assert document("predict", bundle, source, "--compare")["differs"] is False
    for path in source.glob("*/*.png"):
        with Image.open(path) as image:
            image.point(lambda value: value // 2).save(path)
    darker = document("predict", bundle, source, "--compare")
    assert (darker["differs"], darker["images"]) == (True, 52)
    words = output("predict", bundle, source, "--compare").splitlines()[-1]
    assert "expect more mistakes" in words
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    (other / bundles.REFERENCE).unlink()
    bundles.seal(other)
    assert bundles.REFERENCE in refused("predict", other, source, "--compare")


@pytest.mark.parametrize("compare", [False, True])
def test_the_model_is_the_one_whose_signature_was_checked(
    bundle: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compare: bool
) -> None:
    key = Ed25519PrivateKey.generate()
    pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "key.pub").write_bytes(pem)
    monkeypatch.setenv("PUB", pem.decode())
    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    network, info = weights.read(other / bundles.WEIGHTS, 0)
    torch.nn.init.zeros_(network.get_parameter("fc.weight"))
    sealed(other, network, info)
    shown = Path(shutil.copytree(bundle, tmp_path / "shown"))
    fetch, exchanges = Folder.fetch, False

    def fetch_and_exchange(self: Folder, name: str, into: BinaryIO, limit: int) -> bool:
        exists = fetch(self, name, into, limit)
        if name == bundles.SIGNATURE and exchanges:
            shutil.rmtree(shown)
            other.rename(shown)
        return exists

    def compute() -> object:
        if compare:
            words = ("predict", shown, source, "--compare", "--key", tmp_path / "key.pub", "--json")
            result = call(*words)
            if result.exception:
                raise result.exception
            return result
        return predict(source, shown, tmp_path / "table.csv", bundle_key="PUB")

    monkeypatch.setattr(Folder, "fetch", fetch_and_exchange)
    with pytest.raises(InputError, match="is not signed"):
        compute()
    signature.sign(shown, key)
    compute()
    exchanges = True
    with pytest.raises(InputError, match="is damaged"):
        compute()
    assert not other.exists()


@pytest.mark.slow
def test_a_million_objects_are_planned_in_500_mb(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from kfp_ddp.evaluation import bulk
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.storage.listing import Listing
class Fake:
    url = "gs://abc/new"
    def listing(self):
        listing = Listing()
        for at in range(1_000_000):
            name = f"2026/12/{{at * 7 % 1_000_003:08d}}/photograph.jpg"
            listing.add(name, 1000, at, at, f"md5-{{at:032x}}")
        return listing
bulk.open_source = lambda *_: Fake()
inputs = "{tmp_path}", "gs://abc/model", "{tmp_path}/table.csv", {{}}
request = PredictionRequest.from_inputs(*inputs)
table = bulk.Table(request.table, ["a", "b"], "digest")
todo, missing = table.plan(bulk.list_objects(request, table)[0])
assert missing == sum(map(len, table.shards(todo, 1024))) == 1_000_000
assert "torch" not in sys.modules
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500 << 10  # KiB, of the interpreter, too
