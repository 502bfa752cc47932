"""Code that lies in a bucket or on a claim reaches the workers, or one line says why not."""

import random
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.jobs import code
from kfp_ddp.jobs.authoring import as_folder
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.payload import bring
from tests import workers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print('ran')")
    return tmp_path / "code"


def specification(inputs: dict[str, Any], **more: Any) -> LaunchSpec:
    return LaunchSpec.create(image="a:1", kind="tfjob", **inputs, **more)


def in_a_bucket(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return as_folder(folder, "train.py", upload=f"file://{tmp_path}/bucket/code/")


def refused(spec: LaunchSpec, run_dir: Path | None = None) -> str:
    with pytest.raises(InputError) as error:
        bring(spec, run_dir)
    line = str(error.value)
    assert "\n" not in line
    return line


def test_small_code_from_a_bucket_travels_in_the_manifest(folder: Path, tmp_path: Path) -> None:
    uploaded = in_a_bucket(folder, tmp_path)
    digest = code.digest_in(uploaded["code"])
    assert uploaded["code"] == f"file://{tmp_path}/bucket/code/{digest}.tar.gz"
    spec = bring(specification(uploaded), None)
    assert spec == specification(as_folder(folder, "train.py"))
    assert bring(spec, None) == spec


def test_large_code_from_a_bucket_travels_by_the_work_claim(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.bin").write_bytes(random.Random(1).randbytes(900_000))
    uploaded = in_a_bucket(folder, tmp_path)
    run_dir = tmp_path / "work" / "run"
    run_dir.mkdir(parents=True)
    line = refused(specification(uploaded, claims={str(tmp_path / "work"): "work"}))
    assert line.endswith("mount a PVC on the task and set work_dir to a folder on it")
    assert "is not on a PVC that the workers mount" in refused(specification(uploaded), run_dir)
    spec = specification(uploaded, claims={str(tmp_path / "work"): "work"})
    for _ in range(2):  # the second time it is there
        result = bring(spec, run_dir)
        assert Path(result.code).is_relative_to(run_dir)
        assert Path(result.code).stat().st_mode & 0o777 == 0o644
    done = workers.run(result, tmp_path / "worker")
    assert done.stdout == b"ran\n", done.stderr.decode()


def test_an_unwritable_pvc_is_a_storage_error(folder: Path, tmp_path: Path) -> None:
    (folder / "weights.bin").write_bytes(random.Random(1).randbytes(900_000))
    spec = specification(in_a_bucket(folder, tmp_path), claims={str(tmp_path): "work"})
    (tmp_path / "work").touch()
    with pytest.raises(StorageError, match=r"^cannot write to .*: Not a directory; "):
        bring(spec, tmp_path / "work")


def test_code_on_a_claim_is_read_by_the_workers_from_there(folder: Path, tmp_path: Path) -> None:
    inputs = as_folder(folder, "train.py", upload=f"{tmp_path}/claim")
    assert "is not on a PVC that the workers mount" in refused(specification(inputs))
    spec = specification(inputs, claims={str(tmp_path): "work"})
    assert bring(spec, None) == spec
    Path(inputs["code"]).unlink()
    assert bring(spec, None) == spec  # the step may not mount it, and workers hold it to its digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda file: file.unlink(), "not found: upload it with as_folder"),
        (lambda file: file.write_bytes(b"else"), "..., not the one of its name: upload it again"),
        (lambda file: file.write_bytes(b""), "..., not the one of its name: upload it again"),
    ],
    ids=["missing", "changed", "empty"],
)
def test_other_code_is_refused(folder: Path, tmp_path: Path, change: Any, says: str) -> None:
    uploaded = in_a_bucket(folder, tmp_path)
    change(Path(uploaded["code"].removeprefix("file://")))
    assert refused(specification(uploaded)).endswith(says)


def test_an_invalid_entry_or_value_is_refused(folder: Path, tmp_path: Path) -> None:
    good = as_folder(folder, "train.py")
    wrong = {**good, "entry": "trian.py"}
    assert "entry='trian.py' is not in the folder of code, which has train.py" in refused(
        specification(wrong)
    )
    uploaded = {**in_a_bucket(folder, tmp_path), "entry": "trian.py"}
    assert "entry='trian.py' is not in the folder of code" in refused(specification(uploaded))
    for cut in (good["code"][:-1], good["code"][:-8]):
        line = refused(specification({**good, "code": cut}))
        assert "make it with" in line
        assert good["code"][60:] not in line
