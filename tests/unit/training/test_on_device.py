"""JPEG files go to the device undecoded: a GPU, or a CPU, by the same function of torchcodec."""

import io
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.pictures.splits import scan
from kfp_ddp.training import prepare
from kfp_ddp.training.data import on_device, transforms
from kfp_ddp.training.data.cache import Cache
from kfp_ddp.training.data.loader import Batch, Images
from tests.training_ranks import ALONE, config, trainer
from tests.unit.training.test_fractions import photograph, run

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOTH = on_device.WAYS


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return photograph(orientation, 90, 70, exif=exif.tobytes(), quality=30)


def converted(mode: str, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture = Image.open(io.BytesIO(photograph(3, 90, 70)))
    picture.convert(mode).save(file, kind, quality=30, **options)
    return file.getvalue()


SMALL = photograph(1, 90, 70, quality=30)
DEVICE = {
    "baseline.jpg": SMALL,
    "progressive.jpg": photograph(2, 90, 70, quality=30, progressive=True),
    "profile.jpg": photograph(2, 90, 70, quality=30, icc_profile=b"profile"),
    **{f"turned{number}.jpg": turned(number) for number in (1, 3, 6, 8, 9)},
}
LOADER = {
    "grey.jpg": converted("L", "JPEG"),
    "cmyk.jpg": converted("CMYK", "JPEG"),
    "stored_as_rgb.jpg": converted("RGB", "JPEG", keep_rgb=True),
    "adobe.jpg": SMALL[:2] + b"\xff\xee\x00\x0eAdobe\0\x64\0\0\0\0\0" + SMALL[2:],
    "other.jpg": converted("RGB", "PNG"),
    "large.jpg": photograph(4, 4 * 64 + 1, 70, quality=5),
    "many_bytes.jpg": photograph(5, 200, 200, quality=100),
}


def folder(root: Path, files: dict[str, bytes]) -> Path:
    for number, (name, content) in enumerate(files.items()):
        path = root / "train" / f"class{number % 2}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root / "train"


def both(split: Path, **fields: Any) -> tuple[Batch, Batch, Batch]:
    """All images of a split as loaders decode them, as they send them, and as the device does."""
    index = scan(split)
    keys = [(2, position) for position in range(len(index))]
    settings = {"image_size": 64, "on_bad_image": "skip", **fields}
    loads = [Images(index, run(split, decode=way, **settings), True) for way in BOTH]
    plain, sent = (images.__getitems__(keys) for images in loads)
    return plain, sent, loads[1].decode(HERE, sent)


@pytest.mark.parametrize("augment", ["none", "shift-flip", "crop", "crop-flip"])
def test_device_decodes_what_a_loader_does(tmp_path: Path, augment: str) -> None:
    plain, sent, decoded = both(folder(tmp_path, DEVICE | LOADER), augment=augment)
    assert sent.rows is not None
    names = [Path(scan(tmp_path / "train").paths[at]).name for at in sent.indices]
    assert {name for name, turn in zip(names, sent.rows.turns, strict=True) if turn} == set(DEVICE)
    assert sent.images.numel() <= plain.images.numel(), "shared memory is sized for pixels"
    assert decoded[1:] == plain[1:]
    errors = (decoded.images.cpu().float() - plain.images.float()).abs().mean((1, 2, 3))
    assert errors.max() <= (0 if HERE.type == "cpu" else 2)


def test_nothing_is_sent_undecoded_in_vain(tmp_path: Path) -> None:
    split = folder(tmp_path, LOADER)
    assert both(split)[1].rows is None
    index, settings = scan(split), run(split, image_size=64, decode="gpu")
    cache = Cache(tmp_path / "cache", "train", len(index), 1)
    cache.build(index.where, settings, True, 0)
    assert Images(index, settings, True, cache).__getitems__([(0, 0)]).rows is None
    assert Images(index, settings, for_training=False).__getitems__([(0, 0)]).rows is None


def test_damage_is_as_in_a_loader(tmp_path: Path) -> None:
    """Where the decoder of the device refuses a batch, and where a file is no picture at all."""
    no_tables = SMALL[: SMALL.index(b"\xff\xdb")] + SMALL[SMALL.index(b"\xff\xc0") :]
    damaged = {"cut.jpg": SMALL[:-9], "no_tables.jpg": no_tables, "text.jpg": b"text"}
    split = folder(tmp_path, DEVICE | damaged)
    plain, sent, decoded = both(split)
    assert sent.rows is not None
    assert decoded[1:] == plain[1:]
    assert len(decoded.skipped) == len(damaged)
    assert torch.equal(decoded.images, plain.images)
    (split / "class0" / "text.jpg").unlink()
    (split / "class0" / "cut.jpg").unlink()
    with pytest.raises(InputError, match=r"cannot decode .*no_tables\.jpg"):
        both(split, on_bad_image="fail")


@pytest.mark.parametrize("side", [9, 40, 150])
def test_float_resize_is_within_one_of_the_exact(side: int) -> None:
    draw = torch.Generator().manual_seed(side)
    images = torch.randint(256, (2, 3, 50, 70), generator=draw).to(torch.uint8)
    exact, inexact = (
        transforms._interpolate(images, (side, side), exact=way).int() for way in (True, False)
    )
    assert (exact - inexact).abs().max() <= 1


@pytest.mark.parametrize(
    ("device", "fields", "what"),
    [
        ("cpu", {}, "NVIDIA"),
        ("cuda", {"images": "strict"}, "strict"),
        ("cuda", {"randaugment": 9}, "randaugment"),
        ("cuda", {"decode": "auto", "deterministic": True}, "deterministic"),
        ("cuda", {}, "" if torch.cuda.is_available() else "torchcodec cannot"),
    ],
)
def test_obstacles(tmp_path: Path, device: str, fields: dict[str, Any], what: str) -> None:
    settings = run(tmp_path, **{"decode": "gpu", **fields})
    reason = on_device.obstacle(settings, torch.device(device))
    assert what in reason
    assert bool(what) is bool(reason)
    if device == "cpu":
        with pytest.raises(InputError, match="decode=gpu is not possible"):
            prepare.resolve(settings, ALONE, images=4)
        auto = settings.model_copy(update={"decode": "auto"})
        assert prepare.resolve(auto, ALONE, images=4).decode == "cpu"


@pytest.mark.parametrize("seconds", [(2.0, 1.0), (1.0, 2.0)])
def test_auto_takes_the_faster(seconds: tuple[float, float]) -> None:
    """A step has two micro-batches; loaders have three steps ready, which are not measured."""
    cost, now, open_ways, lines = dict(zip(BOTH, seconds, strict=True)), [0.0], [""], [""]

    def begin(way: str, step: int) -> Generator[tuple[str, int]]:
        assert open_ways == [""], "loaders of the other way have ended"
        open_ways[0] = way
        try:
            for number in range(2 * step, 2 * 60):
                now[0] += cost[way]
                yield way, number
        finally:
            open_ways[0] = ""

    batches = list(on_device.fastest(begin, 2, 3, lambda: now[0], lines.append))
    assert [number for _, number in batches] == list(range(2 * 60)), "each exactly once"
    ways = [way for way, _ in batches]
    faster = min(cost, key=lambda way: cost[way])
    assert ways == ["cpu"] * 2 * 23 + ["gpu"] * 2 * 23 + [faster] * 2 * 14
    assert lines[-1].startswith(f"decode={faster}")


def test_training_in_each_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same weights: a CPU decodes here whatever its loader process sends."""
    monkeypatch.setattr(on_device, "STEPS", 1)
    monkeypatch.setattr(on_device, "obstacle", lambda *_: "")
    split = folder(tmp_path, {f"{n}.jpg": photograph(n, 20, 16, quality=30) for n in range(40)})
    weights = []
    for way in (*BOTH, "auto"):
        fields = {"decode": way, "workers": 1, "epochs": 2, "batch_size": 2, "image_size": 16}
        running = trainer(config(split.parent, tmp_path / way, **fields))
        assert running.fit()
        weights.append([*running.learner.network.state_dict().values()])
    for others in weights[1:]:
        assert all(map(torch.equal, weights[0], others))
