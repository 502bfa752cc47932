"""Weights to begin with that lie at an address."""

import hashlib
import shutil
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from google.cloud import storage

from kfp_ddp.core.errors import InputError, StorageError, UnavailableError
from kfp_ddp.core.run_folder import RunFolder
from kfp_ddp.models import bundle, champion, weights, weights_download
from kfp_ddp.runs.training_folder import with_local_weights
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.source import Retry
from kfp_ddp.training.model.networks import build
from kfp_ddp.training.spec.config import TrainConfig
from kfp_ddp.training.spec.torchvision_weights import TORCHVISION
from kfp_ddp.training.state import checkpoint
from kfp_ddp.training.state.initial_weights import read
from tests import tls
from tests.evaluations import Trained
from tests.serving import serving


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_RETRY", "_PROBES"):
        monkeypatch.setattr(weights_download, name, Retry(2, 0.01))


def config(pretrained: str, output: Path) -> TrainConfig:
    return TrainConfig.create(
        data="/d", output_dir=str(output), pretrained=pretrained, model="cifar_resnet8"
    )


def local(address: str, run_dir: Path) -> Path:
    """Return the local copy of the weights for a run."""
    return Path(with_local_weights(config(address, run_dir)).pretrained)


def agrees(path: Path, state: dict[str, torch.Tensor]) -> bool:
    (fetched,) = read(path).mappings.values()
    return all(torch.equal(fetched[name], value) for name, value in state.items())


def test_file_in_a_bucket_is_downloaded_once(emulator: storage.Client, tmp_path: Path) -> None:
    state = build("cifar_resnet8", 2).state_dict()
    torch.save(state, tmp_path / "theirs.pth")
    blob = emulator.bucket("models").blob("pretrained/epoch=9.ckpt")
    blob.upload_from_filename(tmp_path / "theirs.pth")
    address = "gs://models/pretrained/epoch=9.ckpt"
    weights_download.check(address)
    fetched = local(address, tmp_path / "run")
    assert fetched.parents[1] == RunFolder(tmp_path / "run").initial_weights
    assert agrees(fetched, state)
    other = {name: value + 1 for name, value in state.items()}
    torch.save(other, tmp_path / "theirs.pth")
    emulator.bucket("models").blob("v2/theirs.pth").upload_from_filename(tmp_path / "theirs.pth")
    assert agrees(local("gs://models/v2/theirs.pth", tmp_path / "run"), other)
    blob.delete()
    assert local(address, tmp_path / "run") == fetched
    for missing in (address, "gs://models/nothing"):
        with pytest.raises(InputError, match="does not exist: correct the address"):
            weights_download.check(missing)
        with pytest.raises(InputError, match="does not exist: correct the address"):
            local(missing, tmp_path / "other")
    with pytest.raises(InputError, match="has neither a bundle nor a checkpoint: give the addr"):
        local("gs://models/v2", tmp_path / "other")


def test_bundle_champion_and_checkpoint_by_uri(trained: Trained, tmp_path: Path) -> None:
    network, info = checkpoint.load_model(trained.checkpoint)
    where = open_store((tmp_path / "models").as_uri())
    bundle_folder = tmp_path / "bundle"
    bundle_folder.mkdir()
    weights.write(network, info, bundle_folder / bundle.WEIGHTS)
    trained.evaluate()
    (bundle_folder / "metrics.json").write_bytes(trained.evaluation.read_bytes())
    bundle.seal(bundle_folder)
    uri = bundle.upload(bundle_folder, "squares", where)
    champion.move(where, "squares", bundle.version(bundle_folder), "")
    shutil.copytree(trained.checkpoint, tmp_path / "run.pth")
    for number, address in enumerate(
        (
            *(uri, f"{where.uri}/squares", str(tmp_path / "models" / "squares")),
            *(trained.checkpoint.as_uri(), f"{uri}/model.safetensors"),
            (tmp_path / "run.pth").as_uri(),
        )
    ):
        run_dir = tmp_path / f"with_local_weights-{number}"
        weights_download.check(address)
        fetched = local(address, run_dir)
        assert agrees(fetched, network.state_dict()), address
        assert read(fetched).classes == info.classes
    target = Path(uri.removeprefix("file://")) / bundle.WEIGHTS
    target.write_bytes(target.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match=r"damaged: model\.safetensors is not what MANIFEST"):
        local(uri, tmp_path / "x")
    assert not list(RunFolder(tmp_path / "x").initial_weights.glob("[!.]*"))


def test_unreachable_address_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^cannot fetch pretrained=https://127\.0\.0\.1:9/x"):
        local("https://127.0.0.1:9/x-01234567.pth", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot download pretrained=file:///nowhere/x\.pth to"):
        with_local_weights(config("file:///nowhere/x.pth", tmp_path / "file"))
    plain: Any = config("/a/path.pth", tmp_path)
    assert with_local_weights(plain) is plain


def test_torchvision_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    find, file = weights_download.find, tmp_path / "torch/hub/checkpoints/r-01234567.pth"
    monkeypatch.setitem(TORCHVISION["resnet18"], "DEFAULT", file.name)
    none = find("auto", "resnet18")
    assert not none
    assert "KFP_DDP_WEIGHTS" in none.origin
    with pytest.raises(InputError, match="cannot be had: KFP_DDP_WEIGHTS is off"):
        find("true", "resnet18")
    with monkeypatch.context() as variables:
        variables.setenv("KFP_DDP_WEIGHTS", "https://me:hunter2@h")
        with pytest.raises(InputError, match=r"^KFP_DDP_WEIGHTS is an address with a login"):
            find("auto", "resnet18")
    # No word of alarm where there are no weights, or where they are not wished for.
    assert (
        find("auto", "cifar_resnet8") == find("false", "resnet18") == weights_download.RANDOM_START
    )
    with pytest.raises(InputError, match="has no DEFAULT weights of cifar_resnet8"):
        find("true", "cifar_resnet8")
    monkeypatch.setenv("KFP_DDP_BAKED_WEIGHTS", "resnet50 resnet18")
    assert find("auto", "resnet18")[:2] == ("true", "resnet18")
    assert not find("auto", "resnet18", own_image=True)
    assert not find("auto", "resnet18", images=weights_download.MOST_IMAGES)
    monkeypatch.delenv("KFP_DDP_BAKED_WEIGHTS")
    with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", tmp_path) as server:
        monkeypatch.setenv("KFP_DDP_WEIGHTS", server)
        assert find("auto", "resnet18")[:2] == (f"{server}/{file.name}", "resnet18")
    for gone in (server, str(tmp_path)):
        monkeypatch.setenv("KFP_DDP_WEIGHTS", gone)
        assert not find("auto", "resnet18")
    with answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", tmp_path) as server:
        monkeypatch.setenv("KFP_DDP_WEIGHTS", server)
        assert "HTTP 404" in find("auto", "resnet18").origin
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert not find("auto", "resnet18")
    monkeypatch.setitem(TORCHVISION["resnet18"], "DEFAULT", "r.pth")
    file.rename(file.with_name("r.pth"))
    assert find("torchvision:DEFAULT", "resnet18")[:2] == ("true", "resnet18")
    assert str(file.with_name("r.pth")) in find("true", "resnet18").origin


def test_torchvision_weights_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.save(build("squeezenet1_1", 1000).state_dict(), tmp_path / "w.pth")
    whole = (tmp_path / "w.pth").read_bytes()
    file = f"s-{hashlib.sha256(whole).hexdigest()[:8]}.pth"
    monkeypatch.setitem(TORCHVISION["squeezenet1_1"], "DEFAULT", file)
    for content in (whole[:-1] + b"x", whole):
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        with answering(head + content, tmp_path) as server:
            monkeypatch.setenv("KFP_DDP_WEIGHTS", server)
            start = weights_download.obtain("auto", "squeezenet1_1")
            assert bool(start) == (content == whole)
            if content != whole:
                assert "damaged" in start.origin
                with pytest.raises(StorageError, match="arrived damaged"):
                    weights_download.obtain("true", "squeezenet1_1")
    (path,) = (tmp_path / "torch").rglob("*.pth")
    assert str(path) in start.origin
    assert weights_download.obtain("auto", "squeezenet1_1") == start  # the server is gone
    assert [one.name for one in path.parent.iterdir()] == [file]


@pytest.mark.parametrize(
    ("address", "model"),
    [
        ("gs://b/resnet18-f37072fd.pth", "resnet18"),
        ("/w/wide_resnet50_2.flowers.safetensors", "wide_resnet50_2"),
        ("https://h/shufflenetv2_x0.5-f707e7126e.pth", "shufflenet_v2_x0_5"),
        ("/w/resnet18", ""),
        ("hf://o/flowers.pth", ""),
    ],
)
def test_file_name_tells_the_network(address: str, model: str) -> None:
    assert weights_download.find(address, "auto")[:2] == (address, model)


@contextmanager
def answering(answer: bytes | list[bytes], folder: Path) -> Iterator[str]:
    """The address of a server by TLS that answers so, whatever it is asked; the last one again."""
    answers = answer if isinstance(answer, list) else [answer]

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answers.pop(0) if len(answers) > 1 else answers[0])

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    with tls.trusted(folder) as context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with serving(server) as url:
            yield url.replace("http:", "https:")


@pytest.mark.parametrize(("commit", "pointer"), [(True, True), (True, False), (False, False)])
def test_weights_of_the_hub_are_those_of_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: bool, pointer: bool
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(weights_download.SOURCE, raising=False)
    whole, revision = b"weights", "5" * 40 if commit else "main"
    digest = hashlib.sha256(whole).hexdigest()
    about = b'{"sha": "%b"}' % (b"5" * 40 if commit else b"../../x")
    git = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize 7\n".encode()
    known = [about, *([git if pointer else b"no pointer"] if commit else [])]

    def answer(content: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)

    with answering(answers := [answer(one) for one in (*known, whole)], tmp_path) as server:
        monkeypatch.setenv("HF_ENDPOINT", server)
        address = weights_download.find("true", "timm/test_vit").pretrained
        fragment = f"#sha256={digest}" if pointer else ""
        name = "timm/test_vit.r160_in1k"
        assert address == f"{server}/{name}/resolve/{revision}/model.safetensors{fragment}"
        assert config(address, tmp_path).pretrained == address
        assert weights_download.download(address, tmp_path / "run").read_bytes() == whole
        answers[:] = [answer(one) for one in (*known, whole, whole[::-1])]
        if pointer:
            with pytest.raises(StorageError, match="arrived damaged"):
                weights_download.obtain("true", "timm/test_vit")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hunter2@hub.example")
    with pytest.raises(InputError, match="HF_ENDPOINT") as refused:
        weights_download.find("true", "timm/test_vit")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("fault", [b"HTTP/1.1 503 Away\r\n", b"HTTP/1.1 200 OK\r\n", b""])
def test_fault_is_retried(fault: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = b"Content-Length: 4\r\n\r\n"
    fault = fault and fault + length + b"xy"
    answers = [fault, b"HTTP/1.1 200 OK\r\n" + length + b"data"]
    with answering(answers, tmp_path) as server:
        monkeypatch.setenv("KFP_DDP_WEIGHTS", server)
        monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
        if fault != b"HTTP/1.1 200 OK\r\n" + length + b"xy":
            assert weights_download.find("auto", "resnet18").pretrained.startswith(server)
            answers[:] = [fault, *answers]
        assert local(f"{server}/w.pth", tmp_path / "run").read_bytes() == b"data"
    for ask in (lambda: weights_download.find("true", "resnet18"), lambda: local(server, tmp_path)):
        with pytest.raises(UnavailableError):
            ask()


def test_redirect_to_http_is_not_followed(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/w\r\nContent-Length: 0\r\n\r\n"
    with (
        answering(answer, tmp_path) as server,
        pytest.raises(InputError, match="redirects from https to http"),
    ):
        local(f"{server}/w.pth", tmp_path / "run")


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]
)
def test_too_large_file_fails(head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_download, "_LARGEST", 1 << 20)
    raises_error = r"^pretrained=https://\S+/w\.pth has more than 1,048,576 bytes"
    with (
        answering(head + bytes(3_000_000), tmp_path) as server,
        pytest.raises(InputError, match=raises_error),
    ):
        local(f"{server}/w.pth", tmp_path / "run")
    assert not list(RunFolder(tmp_path / "run").initial_weights.iterdir())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\nhalf",
        b"no answer at all\r\n\r\n",
    ],
)
def test_partial_download_is_not_reused(answer: bytes, tmp_path: Path) -> None:
    raises_error = pytest.raises(StorageError, match=r"^cannot fetch pretrained=https://")
    with answering(answer, tmp_path) as server, raises_error:
        local(f"{server}/w.pth", tmp_path / "run")
    assert not list(RunFolder(tmp_path / "run").initial_weights.iterdir())
    state = build("cifar_resnet8", 2).state_dict()
    torch.save(state, tmp_path / "w.pth")
    whole = (tmp_path / "w.pth").read_bytes()
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(whole)}\r\n\r\n".encode()
    with answering(head + whole, tmp_path) as server:
        for name in ("w-20240131.pth", "m/w.pth.tar?download=true", "file", "a/?dl=1", "%2f.."):
            assert agrees(local(f"{server}/{name}", tmp_path / "run"), state), name
