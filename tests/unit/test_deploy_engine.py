"""The step `deploy` without a valid bundle to roll out."""

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.deploy.component import deploy
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import bundle


def run(tmp_path: Path, address: str, **release: Any) -> tuple[tuple[str, str], str]:
    """Run the step; return its outputs and its report."""
    report = dsl.Markdown(uri=str(tmp_path / "report.md"))
    outputs = deploy.python_func(bundle=address, deploy_report=report, release=release)
    return tuple(outputs), Path(report.path).read_text()


def bare(folder: Path) -> str:
    """Write a bundle without a sample to a folder named by its version; return its path."""
    (folder / "new").mkdir(parents=True)
    bundle.seal(folder / "new")
    version = bundle.version(folder / "new")
    (folder / "new").rename(folder / version)
    return str(folder / version)


def test_without_a_service_an_upload_or_a_champion_nothing_is_done(tmp_path: Path) -> None:
    outputs, report = run(tmp_path, "gs://models/exports/flowers/0123456789ab")
    assert (outputs, "no service is named" in report) == (("", ""), True)
    outputs, report = run(tmp_path, "", service="shop")
    assert (outputs, "nothing was uploaded" in report) == (("", ""), True)
    address = bare(tmp_path / "flowers")
    (tmp_path / "flowers/CHAMPION").write_text("ba9876543210\n")
    outputs, report = run(tmp_path, address, service="shop")
    assert (outputs, "ba9876543210 is the champion now" in report) == (("", ""), True)


def test_invalid_input_fails_with_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Api, "connect", lambda: Api(None, "here"))
    address = bare(tmp_path / "flowers")
    (tmp_path / "flowers/CHAMPION").write_text(f"{Path(address).name}\n")
    with pytest.raises(SystemExit, match=r"has no sample/request\.json to try a service with"):
        run(tmp_path, address, service="shop")
    (Path(address) / "MANIFEST.sha256").unlink()
    with pytest.raises(SystemExit, match=r"is damaged: MANIFEST\.sha256 is missing"):
        run(tmp_path, address, service="shop")
    with pytest.raises(SystemExit, match="release has no setting 'servis'"):
        run(tmp_path, address, servis="shop")
