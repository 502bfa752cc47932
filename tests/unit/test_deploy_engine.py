"""The step `deploy` where there is nothing to roll out, or what there is cannot be used."""

from pathlib import Path
from typing import Any

import pytest
from kfp import dsl

from kfp_ddp.components.deploy.component import deploy
from kfp_ddp.k8s.api import Api
from kfp_ddp.models import bundle


def run(tmp_path: Path, address: str, **release: Any) -> tuple[tuple[str, str], str]:
    """What the step returns, and its report."""
    report = dsl.Markdown(uri=str(tmp_path / "report.md"))
    found = deploy.python_func(bundle=address, deploy_report=report, release=release)
    return tuple(found), Path(report.path).read_text()


def bare(folder: Path) -> str:
    """A whole bundle in a folder named by its version, without a sample; its path."""
    (folder / "new").mkdir(parents=True)
    bundle.seal(folder / "new")
    version = bundle.version(folder / "new")
    (folder / "new").rename(folder / version)
    return str(folder / version)


def test_without_a_service_or_an_upload_nothing_is_done(tmp_path: Path) -> None:
    nothing = ("", "")
    found, said = run(tmp_path, "gs://models/exports/flowers/0123456789ab")
    assert (found, "no service is named" in said) == (nothing, True)
    found, said = run(tmp_path, "", service="shop")
    assert (found, "nothing was uploaded" in said) == (nothing, True)


def test_what_is_not_the_champion_any_more_stays_where_it_is(tmp_path: Path) -> None:
    address = bare(tmp_path / "flowers")
    (tmp_path / "flowers/CHAMPION").write_text("ba9876543210\n")
    found, said = run(tmp_path, address, service="shop")
    assert (found, "ba9876543210 is the champion now" in said) == (("", ""), True)


def test_a_bundle_that_cannot_be_tried_ends_the_step_in_one_line(
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
