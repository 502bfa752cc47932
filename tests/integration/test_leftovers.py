"""Temporary folders that processes must not leave behind."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from kfp import compiler, dsl

from kfp_ddp.training import node
from tests.local_pipeline import pipeline


@dsl.component(base_image="python:3.11", install_kfp_package=False)  # type: ignore[untyped-decorator]
def _nothing() -> None: ...


@dsl.pipeline(name="nothing")  # type: ignore[untyped-decorator]
def _pipeline() -> None:
    _nothing()


def test_a_local_run_leaves_no_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary, compiled = tmp_path / "tmp", tmp_path / "pipeline.yaml"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    compiler.Compiler().compile(_pipeline, str(compiled))
    done = pipeline({}, tmp_path, compiled)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(temporary.glob("kfp-workspace-*"))


def test_abandoned_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen(["true"]) as child:
        child.wait()
    names = {
        "old": f"{node.ERRORS}{child.pid}-a",
        "new": f"{node.ERRORS}{child.pid}-b",
        "alive": f"{node.ERRORS}{os.getpid()}-c",
        "foreign": f"{node.ERRORS}x-d",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "0").touch()
        if name != names["new"]:
            os.utime(tmp_path / name, (1, 1))
    node._remove_abandoned()
    assert {path.name for path in tmp_path.iterdir()} == set(names.values()) - {names["old"]}
