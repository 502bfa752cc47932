"""The publish step: seal a blessed bundle with its verdict, upload it, make it the champion."""

import contextlib
import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from kfp import dsl

from kfp_ddp.components.publish.component import publish
from kfp_ddp.core import folders
from kfp_ddp.core.run_folder import EXPORTED, MLFLOW, VERDICT
from kfp_ddp.export import publish as publishing
from kfp_ddp.models import attempts, bundle, signature
from kfp_ddp.models.bundle import LINEAGE
from kfp_ddp.models.champion import history, move, replaced_by
from kfp_ddp.storage.folder import Folder
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Change
from tests.evaluations import written
from tests.files import write
from tests.registry_server import server as registry
from tests.registry_server.server import RegistryServer

A, B = "a" * 12, "b" * 12


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with an evaluation, a verdict, a report and a bundle."""
    run_dir = tmp_path / "run"
    written(run_dir / "evaluation", 3)
    verdict = {"blessed": True, "reason": "blessed: all of it", "champion": A}
    (run_dir / "evaluation" / VERDICT).write_text(json.dumps(verdict))
    (run_dir / "evaluation" / "report.html").write_text("<p>the verdict</p>")
    with bundle.replacing(run_dir) as folder:
        written(folder, 3, "metrics.json")
        (folder / "model.onnx").write_bytes(bytes(100))
        write(folder / "serving" / "m" / "labels.txt", "cat\n")
    return run_dir


def arguments(run_dir: Path, out: Path, **changed: Any) -> dict[str, Any]:
    return {
        "bundle": str(run_dir / "bundle"),
        "evaluation": str(run_dir / "evaluation" / "evaluation.json"),
        "model_name": "squares",
        "destination": str(out / "models"),
        "run_id": "run-1",
        "published_model": dsl.Model(name="model", uri=str(out / "model")),
        "publish_summary": dsl.Markdown(name="summary", uri=str(out / "summary")),
        **changed,
    }


def state(folder: Path) -> dict[Path, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


def test_a_published_bundle_has_verdict_report_and_lineage(run_dir: Path, tmp_path: Path) -> None:
    before = bundle.version(run_dir / "bundle")
    exports = (tmp_path / "models" / "squares").as_uri()
    changed = {"champion": exports, "champion_version": ""}
    inputs = arguments(run_dir, tmp_path, destination=(tmp_path / "models").as_uri(), **changed)
    uri, version = publish.python_func(**inputs)
    assert uri == f"{inputs['destination']}/squares/{version}"
    assert version != before
    target = tmp_path / "models" / "squares" / version
    assert bundle.intact(target)
    assert bundle.local_bundle(target).exported_version == before
    assert bundle.files(target) == bundle.files(run_dir / "bundle")
    assert (target / VERDICT).read_bytes() == (run_dir / "evaluation" / VERDICT).read_bytes()
    assert (target / "report.html").read_text() == "<p>the verdict</p>"
    lineage = json.loads((target / LINEAGE).read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", lineage.pop("exported_at"))
    assert lineage == {
        "run_id": "run-1",
        "champion": exports,
        "champion_version": "",
        "mlflow_run_id": "",
        "dataset_digest": "d" * 64,
    }
    metadata = inputs["published_model"].metadata
    assert (metadata["uri"], metadata["version"], metadata["champion"]) == (uri, version, True)
    assert json.loads((tmp_path / "model").read_text()) == metadata
    assert json.loads((run_dir / EXPORTED).read_text()) == metadata
    assert version in (tmp_path / "summary").read_text()


def test_a_bundle_that_is_not_the_champion_is_reported_everywhere(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exports = tmp_path / "models" / "squares"
    write(exports / "CHAMPION", B)
    inputs = arguments(run_dir, tmp_path, champion=str(exports), champion_version=A)
    uri, version = publish.python_func(**inputs)
    reason = inputs["published_model"].metadata["champion_stays"]
    assert f"CHAMPION names {B}" in reason
    assert bundle.intact(Path(uri))
    assert (exports / "CHAMPION").read_text() == B
    assert inputs["published_model"].metadata["champion"] is False
    assert reason in capsys.readouterr().out.splitlines()
    assert reason in (tmp_path / "summary").read_text()

    inputs = arguments(run_dir, tmp_path, champion=str(exports), champion_version=B)
    for _ in range(2):
        _, version = publish.python_func(**inputs)
        assert (exports / "CHAMPION").read_text() == f"{version}\n"
        assert inputs["published_model"].metadata["champion"] is True


def test_no_bundle_is_deleted_if_the_versions_in_service_are_unknown(
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    where = open_store(str(tmp_path / "models" / "squares"))
    old = write(tmp_path / "models" / "squares" / A / "_SUCCESS", "served for weeks")
    attempts.note(where, "1", version=A, champion="", reason="blessed")
    inputs = arguments(run_dir, tmp_path, attempt="2", keep=1, champion_version="", champion="")
    publish.python_func(**inputs, release={"service": "shop"})
    assert "no bundle was deleted: no Kubernetes cluster is configured" in capsys.readouterr().out
    assert old.exists()
    publish.python_func(**inputs)
    assert not old.exists(), "without a service"


class KilledError(BaseException):
    """The end of a pod."""


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5, 6])
def test_a_step_killed_while_it_uploads_to_the_run_is_completed_by_the_next(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setenv(folders.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    exports = tmp_path / "models" / "squares"
    write(exports / "CHAMPION", A)
    inputs = arguments(run_dir, tmp_path, champion=str(exports), champion_version=A)
    inputs |= {name: f"file://{inputs[name]}" for name in ("bundle", "evaluation")}
    put, left = Folder.put, [after]

    def until_killed(self: Folder, file: Path, name: str) -> bool:
        if self.root == run_dir and not name.startswith("."):
            left[0] -= 1
            if left[0] < 0:
                raise KilledError
        return put(self, file, name)

    times = itertools.count()
    clock = SimpleNamespace(gmtime=lambda: None, strftime=lambda *_: f"at {next(times)}")
    monkeypatch.setattr(publishing, "time", clock)
    with monkeypatch.context() as patch, contextlib.suppress(KilledError):
        patch.setattr(Folder, "put", until_killed)
        publish.python_func(**inputs)
    uri, version = publish.python_func(**inputs)
    assert bundle.intact(Path(uri))
    assert (exports / "CHAMPION").read_text() == f"{version}\n"
    assert inputs["published_model"].metadata["champion_stays"] == ""
    assert bundle.intact(run_dir / "bundle")
    assert bundle.version(run_dir / "bundle") == version


@pytest.mark.parametrize("file", ["CHAMPIONS", "CHAMPION", "tried/new.json"])
def test_a_step_killed_while_it_moves_the_champion_keeps_the_way_back(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    where = open_store(str(tmp_path / "models" / "squares"))
    for number, version in enumerate((A, B)):
        where.write(f"{version}/_SUCCESS", b"x")
        monkeypatch.setattr("time.time", lambda number=number: float(number))
        move(open_store(str(tmp_path / "models")), "squares", version, (["", A])[number])
        attempts.note(where, version, version=version, champion="", reason="blessed")
    inputs = arguments(run_dir, tmp_path, attempt="new", keep=1)
    monkeypatch.setattr("time.time", lambda: 9.0)
    update = Folder.update

    def killed_after(self: Folder, name: str, change: Change) -> None:
        update(self, name, change)
        if f"{self.root}/{name}".endswith(f"/squares/{file}"):
            raise KilledError

    with monkeypatch.context() as patch, contextlib.suppress(KilledError):
        patch.setattr(Folder, "update", killed_after)
        publish.python_func(**inputs)
    _, version = publish.python_func(**inputs)
    assert replaced_by(history(where), version) == B
    assert {name.split("/")[0] for name, _ in where.list("") if "_SUCCESS" in name} == {B, version}
    record = json.loads(where.read("tried/new.json", 9999) or b"")
    assert (record["version"], record["champion"]) == (version, B)


def test_without_a_destination_the_bundle_remains_in_the_run(run_dir: Path, tmp_path: Path) -> None:
    inputs = arguments(run_dir, tmp_path, destination="")
    uri, version = publish.python_func(**inputs)
    assert (uri, version) == ("", bundle.version(run_dir / "bundle"))
    assert inputs["published_model"].metadata["champion"] is False
    assert (run_dir / "bundle" / VERDICT).is_file()


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (None, "run gate before publish"),
        ('{"blessed": false, "reason": "not blessed: too bad"}', "too bad"),
        ('{"blessed": true, "reason": "", "evaluation_sha256": "00"}', "of another evaluation"),
        ('{"blessed": true, "reason": "", "bundle": "00"}', "of another bundle"),
    ],
)
def test_a_rejected_model(verdict: str | None, text: str, run_dir: Path, tmp_path: Path) -> None:
    path = run_dir / "evaluation" / VERDICT
    path.unlink()
    if verdict is not None:
        path.write_text(verdict)
    before = state(run_dir / "bundle")
    with pytest.raises(SystemExit, match=text):
        publish.python_func(**arguments(run_dir, tmp_path))
    assert state(run_dir / "bundle") == before
    assert not list((tmp_path / "models").rglob("*"))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"destination": "ftp://models"}, "cannot store files at ftp://models"),
        ({"destination": "/dev/null/models"}, "cannot write /dev/null/models"),
        ({"release": {"sigm": 1}}, "release has no setting 'sigm'"),
        ({"release": {"sign_key": "key.pem"}}, "error: sign_key names the key key.pem"),
    ],
)
def test_bad_input_fails(changed: dict[str, Any], text: str, run_dir: Path, tmp_path: Path) -> None:
    before = state(run_dir)
    with pytest.raises(SystemExit, match=re.escape(text)):
        publish.python_func(**arguments(run_dir, tmp_path, **changed))
    assert state(run_dir) == before
    assert not (tmp_path / "models").exists()


def test_a_damaged_bundle_is_not_published(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "bundle" / "model.onnx").write_bytes(b"torn")
    with pytest.raises(SystemExit, match="no complete bundle"):
        publish.python_func(**arguments(run_dir, tmp_path))
    shutil.rmtree(run_dir / "bundle")
    with pytest.raises(SystemExit, match="no complete bundle"):
        publish.python_func(**arguments(run_dir, tmp_path))
    assert not list((tmp_path / "models").rglob("*"))


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> ec.EllipticCurvePublicKey:
    """The public key of signing.pem in the bucket's secret."""
    key = ec.generate_private_key(ec.SECP256R1())
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    monkeypatch.setenv("signing.pem", text.decode())
    return key.public_key()


def test_a_release_is_signed_and_registered_and_a_repeated_step_writes_nothing(
    run_dir: Path, tmp_path: Path, registry_server: RegistryServer, key: ec.EllipticCurvePublicKey
) -> None:
    release = {"sign_key": "signing.pem", "registry": registry_server.url}
    inputs = arguments(run_dir, tmp_path, release=release)
    uri, version = publish.python_func(**inputs)
    signature.check(bundle.local_bundle(Path(uri)), signature.key_signer(key))
    assert inputs["published_model"].metadata["signed_by"] == signature.fingerprint(key)
    assert inputs["published_model"].metadata["registry"] == registry_server.url
    (row,) = registry_server.store.versions
    assert row["name"] == version
    assert row["customProperties"]["stage"]["string_value"] == "champion"
    assert row["customProperties"]["signed"]["bool_value"] is True
    assert row["customProperties"]["verdict"]["string_value"] == "blessed: all of it"
    (model,) = registry_server.store.models
    assert model["customProperties"]["champion"]["string_value"] == version
    (artifact,) = registry_server.store.artifacts
    assert artifact["modelSourceId"] == "run-1"
    before, changes = state(tmp_path / "models"), registry_server.changes()
    sealed = state(run_dir / "bundle")
    assert publish.python_func(**inputs) == (uri, version)
    assert (state(tmp_path / "models"), state(run_dir / "bundle")) == (before, sealed)
    assert registry_server.changes() == changes


def test_mlflow_gets_the_version_with_the_run_of_its_training(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    training = MlflowClient().create_run("0").info.run_id
    (run_dir / MLFLOW).write_text(json.dumps({"uri": "", "run_id": training}))
    inputs = arguments(run_dir, tmp_path, release={"registry": "mlflow"})
    uri, version = publish.python_func(**inputs)
    assert publish.python_func(**inputs) == (uri, version)
    (row,) = MlflowClient().search_model_versions("name = 'squares'")
    assert (row.source, row.run_id, row.tags["stage"]) == (uri, training, "champion")


def test_registry_refuses(run_dir: Path, tmp_path: Path, registry_server: RegistryServer) -> None:
    inputs = arguments(run_dir, tmp_path, release={"registry": registry_server.url})
    registry_server.fail("create_model_version", registry.status(503, "no database"))
    with pytest.raises(SystemExit, match=r"^error: the registry \S+ refused .*503: no database"):
        publish.python_func(**inputs)
    assert not (tmp_path / "models" / "squares" / "CHAMPION").exists()
    registry_server.heal()
    uri, version = publish.python_func(**inputs)
    assert (tmp_path / "models" / "squares" / "CHAMPION").read_text() == f"{version}\n"
    assert bundle.intact(Path(uri))
