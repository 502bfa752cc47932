"""Comparison of images with those of an evaluation, against scipy's test of two samples."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats  # type: ignore[import-untyped]

from kfp_ddp.core.errors import InputError
from kfp_ddp.evaluation.drift import SIZE, Sample, compare
from kfp_ddp.models.bundle import REFERENCE, Bundle
from kfp_ddp.models.doubt import Rows, read_reference
from kfp_ddp.storage.kinds import open_store

HEADER = "confidence,energy\n"


def sample(seed: int, images: int, shift: float = 0.0) -> Sample:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, 3, generator=draw).round(decimals=1) + shift  # with equal values
    result = Sample()
    for start in range(0, images, 16):
        some = slice(start, start + 16)
        result.add(map(str, range(images)[some]), logits[some])
    return result


def stored(folder: Path, reference: str) -> Rows | None:
    (folder / REFERENCE).write_text(reference)
    return read_reference(Bundle.at(open_store(str(folder)), sealed=False))


@pytest.mark.parametrize(
    ("images", "shift", "differs"),
    [(5, 0.0, False), (400, 0.0, False), (40, 1.5, True), (900, 0.1, False), (1500, 0.5, True)],
)
def test_result_is_that_of_scipy(tmp_path: Path, images: int, shift: float, differs: bool) -> None:
    first, second = sample(1, 700), sample(2, images, shift)
    result = compare(stored(tmp_path, first.to_csv()), second)
    tables = [io.StringIO(one.to_csv()) for one in (first, second)]
    rows = [np.loadtxt(table, delimiter=",", skiprows=1) for table in tables]
    tests = [stats.ks_2samp(*columns) for columns in zip(*(one.T for one in rows), strict=True)]
    assert len(tests) == 2
    best = max(tests, key=lambda one: one.statistic)
    # A value may count as equal to its neighbour, by which both shares have another step.
    assert result["distance"] == pytest.approx(best.statistic, abs=2 / min(images, SIZE))
    assert result["p_value"] == pytest.approx(min(1.0, 2 * best.pvalue), rel=0.35, abs=1e-12)
    assert (result["differs"], result["images"]) == (differs, min(images, SIZE))
    assert result["reference"] == 700
    assert not differs or result["column"] == "energy"


def test_equal_images_differ_in_one_of_a_hundred_comparisons(tmp_path: Path) -> None:
    where = stored(tmp_path, sample(0, 200).to_csv())
    assert sum(compare(where, sample(seed, 200))["differs"] for seed in range(1, 101)) <= 3


@pytest.mark.parametrize("size", [1, 200])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_what_another_cpu_computes_is_equal(tmp_path: Path, size: int, scale: float) -> None:
    """Also for copies of one image, whose values are all alike."""
    logits = scale * torch.randn(size, 3, generator=torch.Generator().manual_seed(size))
    tables = [Sample(), Sample()]
    for number, table in enumerate(tables):
        off = number * 1e-6 * float(logits.abs().max())
        table.add(map(str, range(200)), (logits + off).repeat(200 // size, 1))
    result = compare(stored(tmp_path, tables[0].to_csv()), tables[1])
    assert (result["differs"], result["distance"]) == (False, 0)


def test_a_sample_depends_neither_on_order_nor_on_parts() -> None:
    whole, other = sample(3, 1200), sample(3, 1200)
    parts = [dict(list(other.rows.items())[at::3]) for at in (2, 0, 1)]
    assert len(whole.rows) == SIZE
    assert Sample().merge(parts).to_csv() == whole.to_csv()


def test_columns_of_earlier_versions_are_left_out(tmp_path: Path) -> None:
    now = stored(tmp_path, f"{HEADER}0.9,2\n0.8,3\n")
    before = stored(tmp_path, "confidence,energy,embedding_0\n0.9,2,7\n0.8,3,x\n")
    assert now is not None
    assert before is not None
    assert now.tolist() == before.tolist() == [[0.9, 2], [0.8, 3]]


@pytest.mark.parametrize(
    "content", ["", HEADER, f"{HEADER}0.9\n", f"{HEADER}0.9,x\n", f"{HEADER}0.9,nan\n", "a\n1,2\n"]
)
def test_a_damaged_reference_is_one_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(InputError, match=REFERENCE):
        compare(stored(tmp_path, content), sample(1, 9))
