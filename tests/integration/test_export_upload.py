from pathlib import Path
from typing import Any

import pytest
from google.cloud import storage

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import publish
from kfp_ddp.models import bundle
from kfp_ddp.storage import store
from kfp_ddp.storage.kinds import open_store
from tests.gcs_server import Bucket


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A small bundle whose files are no model."""
    folder = tmp_path / "bundle"
    (folder / "serving" / "m" / "1").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(bytes(range(256)) * 40_000)  # beyond the multipart limit
    (folder / "empty").write_bytes(b"")
    (folder / "serving" / "m" / "1" / "model.onnx").write_bytes(b"small")
    bundle.seal(folder)
    return folder


def test_a_second_upload_writes_nothing(emulator: storage.Client, sealed: Path) -> None:
    where = open_store("gs://models/exports/")
    where.prepare()
    uri, _ = publish(sealed, "squares", where, "")
    assert uri == f"gs://models/exports/squares/{bundle.digest(sealed)[:12]}"

    def objects() -> dict[str, tuple[bytes, Any]]:
        blobs = emulator.list_blobs("models")
        return {blob.name: (blob.download_as_bytes(), blob.time_created) for blob in blobs}

    first = objects()
    history = {name: first[name][0] for name in ["exports/squares/CHAMPIONS"]}
    prefix = uri.removeprefix("gs://models/") + "/"
    pointer = f"{bundle.digest(sealed)[:12]}\n".encode()
    assert first["exports/squares/CHAMPION"][0] == pointer
    assert {name.removeprefix(prefix): content for name, (content, _) in first.items()} == {
        name: (sealed / name).read_bytes() for name in bundle.files(sealed)
    } | {"exports/squares/CHAMPION": pointer, **history}
    assert publish(sealed, "squares", where, "") == (uri, "")
    assert objects() == first


def test_success_is_uploaded_last(bucket: Bucket, sealed: Path) -> None:
    publish(sealed, "squares", open_store("gs://bucket"), "")
    last = [name.rpartition("/")[2] for name in bucket.writes[-4:]]
    assert last == ["MANIFEST.sha256", "_SUCCESS", "CHAMPIONS", "CHAMPION"]
    assert len(bucket.writes) == len(bundle.files(sealed)) + 2


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("forbidden", "no permission to write"),
        ("race", "changed by another writer"),
        ("damage", "damaged"),
    ],
)
def test_a_failed_upload_is_completed_by_the_next(
    bucket: Bucket, sealed: Path, monkeypatch: pytest.MonkeyPatch, fault: str, text: str, after: int
) -> None:
    monkeypatch.setattr(store, "PATIENCE", 2.0)
    bucket.write_fault, bucket.write_fault_after = fault, after
    with pytest.raises((InputError, StorageError), match=text):
        bundle.upload(sealed, "squares", open_store("gs://bucket/exports"))
    assert not any(name.endswith("_SUCCESS") for name in bucket.objects)

    bucket.write_fault = ""
    uri = bundle.upload(sealed, "squares", open_store("gs://bucket/exports"))
    prefix = uri.removeprefix("gs://bucket/")
    for name in bundle.files(sealed):
        assert bucket.objects[f"{prefix}/{name}"].data == (sealed / name).read_bytes()


def test_missing_credentials_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(InputError, match="there are no credentials for gs://bucket"):
        open_store("gs://bucket").prepare()


def test_only_damaged_files_in_a_folder_are_written_again(sealed: Path, tmp_path: Path) -> None:
    where = open_store(str(tmp_path / "out"))
    uri = bundle.upload(sealed, "squares", where)
    assert bundle.intact(Path(uri))
    (Path(uri) / "model.onnx").write_bytes(b"torn")
    assert where.put(sealed / "model.onnx", f"squares/{Path(uri).name}/model.onnx")
    assert not where.put(sealed / "model.onnx", f"squares/{Path(uri).name}/model.onnx")
    assert bundle.intact(Path(uri))
