"""Packages of a job: what the image lacks is there before it runs, or one line says why not."""

import signal
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.shipping import payload
from kfp_ddp.jobs.shipping.authoring import locked
from tests import workers
from tests.package_index import add, digest, index, serve_uv, wheel
from tests.serving import free_port

TELL = "import kfpddp_one, os; print(kfpddp_one.SAY, os.path.dirname(kfpddp_one.__file__))"


def specification(packages: list[str], url: str, **more: Any) -> LaunchSpec:
    fields = {"image": "a:1", "kind": "tfjob", "script": TELL, "pip_index_urls": [url], **more}
    return LaunchSpec.create(packages_to_install=packages, **fields)


def test_pins_are_installed_with_their_dependencies(tmp_path: Path) -> None:
    spec = specification(["kfpddp-one==1.0"], index(tmp_path))
    done = workers.run(spec, tmp_path / "worker", by_map=False, PIP_USER="1")
    first, last = done.stdout.decode().splitlines()
    pins = first.removeprefix("installing ").replace("_", "-").split(", ")
    assert sorted(pins) == ["kfpddp-one==1.0", "kfpddp-two==2.0"]
    line, place = last.rsplit(" ", 1)
    assert line == "one 1.0"
    assert Path(place).is_relative_to(tmp_path / "worker" / "tmp")
    assert {path.name.partition("-")[0] for path in Path(place).glob("*.dist-info")} == {
        "kfpddp_one",
        "kfpddp_two",
    }


def test_a_lock_is_installed_as_it_stands(tmp_path: Path) -> None:
    url = index(tmp_path)
    lock = [
        f"kfpddp-{name}==1.0 --hash=sha256:{'0' * 64} --hash=sha256:{digest(file)}"
        for name in ("one", "Two")
        for file in tmp_path.glob(f"kfpddp_{name.lower()}-1.0-*.whl")
    ]
    done = workers.run(specification(lock, url), tmp_path / "worker")
    first, last = done.stdout.decode().splitlines()
    assert first.count("==1.0") == 2, done.stderr.decode()
    assert last.startswith("one 1.0 ")


def test_a_package_that_the_image_has_is_not_installed_again(tmp_path: Path) -> None:
    spec = specification([f"PyYAML=={version('pyyaml')}"], index(tmp_path), script="print('ran')")
    done = workers.run(spec, tmp_path / "worker")
    assert done.stdout.decode() == "ran\n", done.stderr.decode()


@pytest.mark.parametrize("has_uv", [True, False])
def test_of_several_indexes_the_first_with_a_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_uv: bool
) -> None:
    """Also where another one has a newer version of it, as whoever may publish there can choose."""
    first, second = tmp_path / "first", tmp_path / "second"
    urls = [index(first), index(second)]
    add(wheel(second, "kfpddp_two", "9.0", "SAY = 'code of a stranger'\n", []), second)
    lock = tmp_path / "uv.lock"
    lock.write_text("".join(serve_uv(second)) if has_uv else f"uv==1 --hash=sha256:{'0' * 64}")
    monkeypatch.setattr(payload, "lock_of", lambda image: lock)
    spec = specification(["kfpddp-one==1.0"], "", pip_index_urls=urls)
    done = workers.run(spec, tmp_path / "worker")
    out, errors = done.stdout.decode(), done.stderr.decode()
    if has_uv:
        assert "kfpddp-two==2.0" in out.splitlines()[0], errors
        assert out.splitlines()[-1].startswith("one 1.0 ")
    else:
        assert done.returncode == 1
        assert errors.splitlines()[-1].startswith("error: packages cannot be installed: ")
        assert "none of them has uv" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("packages", "message"),
    [
        (["kfpddp-one==3.0"], "the requirement kfpddp-one==3.0 (from versions: 1.0, 2.0)"),
        ([f"kfpddp-two==1.0 --hash=sha256:{'0' * 64}"], "DO NOT MATCH THE HASHES"),
    ],
)
def test_failed_installation_is_one_line(tmp_path: Path, packages: list[str], message: str) -> None:
    done = workers.run(specification(packages, index(tmp_path)), tmp_path / "worker")
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith("error: packages cannot be installed: ")
    assert message in last
    assert done.returncode == 1


@pytest.mark.parametrize("path", ["simple", "hunter2/simple", "simple?token=hunter2"])
def test_an_index_that_cannot_be_reached_is_named(path: str, tmp_path: Path) -> None:
    spec = specification(["kfpddp-one==1.0"], f"http://me:hunter2@127.0.0.1:{free_port()}/{path}")
    done = workers.run(spec, tmp_path / "worker", PIP_RETRIES="1")
    last = done.stderr.decode().splitlines()[-1]
    assert "the requirement kfpddp-one==1.0 (from versions: none)" in last
    assert "(the index cannot be reached: " in last
    assert "Connection refused" in last
    assert b"hunter2" not in done.stdout + done.stderr


def test_a_stopped_worker_does_not_wait_for_pip(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        worker = workers.start(specification(["kfpddp-one==1.0"], url), tmp_path / "worker")
        connection, _ = server.accept()  # pip asks, and gets no answer
        with connection:
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(60) == 143
            while connection.recv(1 << 16):  # until pip is gone, too
                pass
    worker.communicate()


def test_a_requirements_file_becomes_a_lock(tmp_path: Path) -> None:
    file, first, second = tmp_path / "requirements.lock", "a" * 64, "b" * 64
    file.write_text(
        "# made by a tool\n"
        f"torch[opt]==2.13.0+cu130 ; python_version >= '3.11' \\\n    --hash=sha256:{first} \\\r\n"
        f"    --hash=sha256:{second}\n    # via timm\n\ntimm==1.0.0 --hash=sha256:{first}  # x\n"
    )
    result = locked(file)
    assert result == [
        f"torch[opt]==2.13.0+cu130 ; python_version >= '3.11' "
        f"--hash=sha256:{first} --hash=sha256:{second}",
        f"timm==1.0.0 --hash=sha256:{first}",
    ]
    spec = LaunchSpec.create(image="a:1", command=["a"], packages_to_install=result)
    assert list(spec.packages_to_install) == result


def test_a_lock_of_our_own_is_one() -> None:
    repository = Path(__file__).parents[3]
    packages = locked(repository / "images" / "wheel" / "requirements.lock")
    spec = LaunchSpec.create(image="a:1", command=["a"], packages_to_install=packages)
    assert any(item.startswith("hatchling==") for item in spec.packages_to_install)
    with pytest.raises(InputError, match="bytes, and a pipeline carries 120,000: lock what the"):
        locked(repository / "requirements.lock")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-r other.txt", "'-r other.txt' is not a pin such as name==1.0"),
        ("timm", "'timm' is not a pin"),
        ("timm==1 ; python_version>'3' --index-url=x", "is not a pin"),
        ("timm @ https://e.com/timm.whl", "is not a pin"),
        (f"a==1 --hash=sha256:{'a' * 64}\nb==2", "'b==2' has no hash and others have"),
        (None, "cannot be read as a requirements file"),
    ],
)
def test_an_invalid_lock_is_an_input_error(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "requirements.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=message):
        locked(file)
