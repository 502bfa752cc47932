"""Batch prediction: one row for each object, resumed to the shard, the same as an evaluation."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from kfp_ddp.evaluation import bulk_rank
from kfp_ddp.evaluation.bulk import Table
from kfp_ddp.evaluation.request import PredictionRequest
from kfp_ddp.models import bundle as bundles
from kfp_ddp.models import weights
from kfp_ddp.models.evaluation import prediction_rows
from kfp_ddp.training.state.checkpoint import ModelInfo, load_model
from tests.evaluations import Trained, written

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def bundle(trained_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a bundle that are read, with its real weights."""
    return sealed(tmp_path_factory.mktemp("bulk") / "bundle", *load_model(trained_checkpoint))


def sealed(folder: Path, network: torch.nn.Module, info: ModelInfo) -> Path:
    written(folder, 0, "metrics.json")
    (folder / "config.json").write_text(json.dumps({"training": info.config}))
    weights.write(network, info, folder / bundles.WEIGHTS)
    bundles.seal(folder)
    return folder


@pytest.fixture
def source(trained: Trained, tmp_path: Path) -> Path:
    """48 images, a broken and an empty one, text, a system's file, and hostile names."""
    folder = Path(shutil.copytree(trained.dataset / "val", tmp_path / "source"))
    one = folder / "red" / "000.png"
    for name in ("=1+1.png", "a,\n'b'.PNG", "_DSC1.JPG", "none"):
        shutil.copy(one, folder / name)
    (folder / "broken.jpg").write_bytes(b"no image")
    (folder / "empty.png").write_bytes(b"")
    (folder / "notes.txt").write_text("text")
    (folder / ".DS_Store").write_bytes(b"\0")
    return folder


def predict(source: Path | str, bundle: Path, table: Path | str, **options: Any) -> dict[str, Any]:
    options = {"batch_size": 8, "shard_images": 10, **options}
    request = PredictionRequest.of(str(source), str(bundle), str(table), options)
    bulk_rank.predict_share(request)
    return Table(str(table)).read_record()


def rows_of(table: Path) -> dict[str, dict[str, Any]]:
    if table.suffix == ".parquet":
        rows = pq.read_table(table).to_pylist()
    else:
        rows = list(csv.DictReader(table.read_text().splitlines(keepends=True)))
    by_name = {row["name"].removeprefix("'"): row for row in rows}
    assert len(by_name) == len(rows), "one row for each object"
    return by_name


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_one_row_for_each_object_as_evaluated(
    source: Path, bundle: Path, trained: Trained, suffix: str
) -> None:
    table = source / f"table{suffix}"
    summary = predict(source, bundle, table)
    rows = rows_of(table)
    ours = {"table.csv", "table.parquet", f"table{suffix}.json", ".DS_Store"}
    names = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert rows.keys() == names - ours
    assert {name for name, row in rows.items() if row["reason"]} == {
        *("broken.jpg", "empty.png", "notes.txt")
    }
    assert (summary["rows"], summary["computed"], summary["unreadable"]) == (55, 55, 3)
    trained.evaluate()
    predictions = prediction_rows((trained.evaluation.parent / "predictions.csv").read_bytes())
    for one in predictions:
        row = rows[one["path"] or ""]
        assert (row["class"], row["bundle"]) == (one["predicted"], summary["bundle"])
        sure = float(row[f"probability_{row['class']}"])
        assert sure == pytest.approx(float(one["confidence"] or 0), abs=2e-6)
    assert sum(summary["classes"].values()) == 52
    assert not list(source.glob("*.parts/*"))
