"""The components under kfp.local, and the command line, as people use them."""

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfp_ddp.components.dataset_volume.component import dataset_volume
from kfp_ddp.datasets.context import SyncCounters
from kfp_ddp.datasets.options import SyncOptions
from kfp_ddp.datasets.report import SyncProgress
from kfp_ddp.datasets.sync import sync
from tests.commands import call, output
from tests.gcs_server import Bucket
from tests.run_output import Terminal
from tests.serving import Files, serving_by
from tests.sync_runs import content, step, write


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KFP_DDP_DATA_DIR", str(tmp_path / "data"))
    names = ("train/a", "train/b", "val/a", "val/b")
    write(tmp_path / "source", {f"{name}/0.png": name.encode() for name in names})
    return tmp_path / "source"


def test_steps_return_facts_and_reports(source: Path, tmp_path: Path) -> None:
    facts, report = step(tmp_path, str(source))
    assert facts["files"] == 4
    assert Path(facts["path"]).parent == tmp_path / "data" / "versions"
    assert (Path(facts["path"]) / "val/b/0.png").read_bytes() == b"val/b"
    assert facts["dataset"].startswith("source-")
    assert "| Downloaded | 4 files" in report
    published = SimpleNamespace(path=str(tmp_path / "volume"), metadata={})
    given = {name: facts[name] for name in ("dataset", "digest", "path")}
    volume = dataset_volume.python_func(
        **given, source=str(source), claim="claim", publish="auto", volume_report=published
    )
    assert tuple(volume) == ("claim", facts["path"])
    assert "| Strategy | `in-place` |" in Path(published.path).read_text()
    assert f"| Dataset | `{facts['dataset']}` |" in Path(published.path).read_text()
    options = {"include": "train/**", "keep_versions": 1, "max_delete": 1}
    assert step(tmp_path, str(source), options=options)[0]["files"] == 2


def test_signature_of_an_address_is_stored_and_printed_nowhere(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = sync(str(source), tmp_path / "first", SyncOptions()).path
    with serving_by(partial(Files, directory=str(version))) as base:
        metadata, _ = step(tmp_path, f"{base}/_MANIFEST.jsonl?sig=S3CRET")
        assert metadata["source"] == f"{base}/_MANIFEST.jsonl"
        with pytest.raises(SystemExit) as refused:
            step(tmp_path, f"{base}/none.jsonl?sig=S3CRET")
    told = [str(refused.value), str(metadata), *capsys.readouterr()]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 8
    assert not any("S3CRET" in text for text in told)
    assert not any(b"S3CRET" in data for data in written)


def test_step_leaves_a_lease_for_its_run(source: Path, tmp_path: Path) -> None:
    digest = str(step(tmp_path, str(source), run_id="run-1")[0]["digest"])
    step(tmp_path, str(source), run_id="run-2")
    step(tmp_path, str(source))
    leases = tmp_path / "data/.kfsync/leases"
    assert sorted(path.name for path in leases.rglob("*.left")) == ["run-1.left", "run-2.left"]
    assert [path.name for path in leases.iterdir()] == [digest[:12]]
    with pytest.raises(SystemExit, match=r"run_id '\.\./x' cannot name a folder"):
        step(tmp_path, str(source), run_id="../x")


def test_command_line_syncs_and_prints_what_it_did(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("ds/a/1.png", b"one")
    bucket.put("ds/a/2.txt", b"two")
    words = ("sync", "gs://bucket/ds", tmp_path / "t")
    assert "1 files, 3 B; downloaded 1 (3 B)" in output(*words, "--include", "*.png", "-j", "2")
    assert content(tmp_path / "t/current") == {"a/1.png": b"one"}
    assert "add                   3  a/2.txt" in output(*words, "--dry-run")
    full = call(*words, "-q")
    assert (full.exit_code, full.stderr) == (0, "")


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_log() -> None:
    meter = SyncCounters(files=1, bytes=500_000)
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with SyncProgress(stream) as progress:
            progress.watch("downloading", meter, 4, 1_000_000)
            line = progress.line(meter)
    assert line.startswith("█" * 12 + "░" * 12 + "  50%  1/4 files  500.0 kB")
    assert log.getvalue() == "downloading 4 files, 1.0 MB\n"
    assert terminal.getvalue().startswith("\r\033[Kdownloading 4 files")
    assert terminal.getvalue().endswith("\r\033[K")
