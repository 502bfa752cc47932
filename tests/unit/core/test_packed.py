"""Packed files as people see them."""

import hashlib

import pytest
import yaml

from kfp_ddp.core.packed import ARCHIVE, PYTHON, WORD, in_short, pack


@pytest.mark.parametrize("kind", [PYTHON, WORD, ARCHIVE])
@pytest.mark.parametrize("size", [0, 9, 20_000])
def test_a_packed_file_is_shown_as_a_comment(kind: str, size: int) -> None:
    content = b"x" * size
    packed = pack(content, kind)
    training = {"epochs": 3, "model_code": packed, "script": packed}
    text = yaml.safe_dump({"model": "net.py:build", "training": training, "name": "a"})
    shown = in_short(text)
    assert "base64" not in shown
    assert yaml.safe_load(shown) == {
        "model": "net.py:build", "training": {"epochs": 3}, "name": "a"
    }  # fmt: skip
    digest = hashlib.sha256(content).hexdigest()[:12]
    human = {0: "0 B", 9: "9 B", 20_000: "20.0 kB"}[size]
    assert f"# model_code: net.py, {human}, sha256 {digest}\n" in shown
    assert f"# script: a file, {human}, sha256 {digest}\n" in shown


def test_other_settings_are_shown_as_they_are() -> None:
    text = yaml.safe_dump({"model": "resnet18", "env": {"A": "data:text/plain,x"}, "b": [1, "x"]})
    assert in_short(text) == text
