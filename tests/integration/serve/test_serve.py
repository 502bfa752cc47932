"""`kfp-ddp serve` answers over HTTP and gRPC with the numbers of the checkpoint."""

import base64
import contextlib
import http.client
import importlib.util
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
import numpy as np
import onnx
import pytest
import requests
import torch
from numpy.typing import NDArray
from PIL import Image

from kfp_ddp.core.errors import InputError
from kfp_ddp.export import contents, formats, infra
from kfp_ddp.export.formats import eager, from_checkpoint
from kfp_ddp.models import bundle
from kfp_ddp.models.bundle import Bundle
from kfp_ddp.pictures.reading import MAX_PIXELS
from kfp_ddp.predict import load, softmax
from kfp_ddp.rollout.engine import check_canary, sample_of
from kfp_ddp.serve.limits import MAX_JSON
from kfp_ddp.serve.served import ready
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.training.state.checkpoint import load_model
from tests.commands import refused
from tests.evaluations import measured
from tests.serving import free_port
from tests.tolerance import assert_computed_alike, near
from tests.waiting import until

SIZE = 16


@pytest.fixture(scope="module")
def sealed(
    trained_checkpoint: Path, trained_dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a bundle with the files that a server reads."""
    folder = tmp_path_factory.mktemp("served") / "bundle"
    return bundle_of(trained_checkpoint, trained_dataset / "val", folder)


def bundle_of(checkpoint: Path, split: Path, folder: Path) -> Path:
    """Make a bundle with the files that a server reads, evaluated on a split."""
    folder.mkdir()
    model, info = load_model(checkpoint)
    servable = formats.Servable(model, info).eval()
    onnx = folder / bundle.ONNX
    formats.write_onnx(formats.trace(servable, SIZE), info, onnx)
    contents.write_repository(folder / "serving", onnx, "squares", info.classes, SIZE)
    bundle.write_json(folder / "classes.json", list(info.classes))
    signature = contents.describe_signature(replace(info, image_size=SIZE))
    bundle.write_json(folder / "signature.json", signature)
    image = infra.pattern(SIZE)
    logits = eager(servable)(torch.from_numpy(image)[None])[0].numpy()
    infra.write_sample(folder, image, logits, "squares", 1e-3)
    measured(folder, model, info, split)
    bundle.seal(folder)
    return folder


class Server(NamedTuple):
    url: str
    grpc_port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def model(self) -> str:
        return f"{self.url}/v2/models/squares"

    def ask(self, content: Any) -> requests.Response:
        return requests.post(f"{self.model}/infer", json=content, timeout=60)


@contextlib.contextmanager
def served(given: str, folder: Path, *more: str) -> Iterator[Server]:
    """Run the command until the block ends; yields when it is ready."""
    port, grpc_port = free_port(), free_port()
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    log = folder / "server.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "kfp_ddp", "serve", given, *ports, "--threads", "1", *more]
        process = subprocess.Popen(command, stdout=out, stderr=out)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(requests.ConnectionError):
            ready = requests.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10)
            return bool(ready.json() == {"ready": True})
        return False

    try:
        until(is_ready, log.read_text, 120)
        yield Server(f"http://127.0.0.1:{port}", grpc_port, process, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(sealed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of the champion of a model's exports."""
    exports = tmp_path_factory.mktemp("exports")
    shutil.copytree(sealed, exports / bundle.version(sealed))
    (exports / "CHAMPION").write_text(bundle.version(sealed) + "\n")
    with served(f"file://{exports}", exports.parent, "--max-batch", "4") as server:
        yield server


def some(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, SIZE, SIZE), np.uint8)


def asking(images: NDArray[np.uint8], **more: Any) -> dict[str, Any]:
    shape = list(images.shape)
    one = {"name": "images", "datatype": "UINT8", "shape": shape, "data": images.ravel().tolist()}
    return {"inputs": [one | more]}


def expected(checkpoint: Path, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.asarray(from_checkpoint(checkpoint)(torch.from_numpy(images)).numpy(), np.float32)


def logits(answer: dict[str, Any]) -> NDArray[np.float32]:
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"]) == ("logits", "FP32")
    return np.array(output["data"], np.float32).reshape(output["shape"])


def test_binary_request_gets_a_binary_response(server: Server, trained_checkpoint: Path) -> None:
    images = some(2)
    asked = {"parameters": {"binary_data_output": True}, **asking(images)}
    asked["inputs"][0] |= {"data": None, "parameters": {"binary_data_size": images.size}}
    text = json.dumps(asked).encode()
    headers = {
        "Inference-Header-Content-Length": str(len(text)),
        "Content-Type": "application/octet-stream",
    }
    answer = requests.post(
        f"{server.model}/infer", text + images.tobytes(), headers=headers, timeout=60
    )
    raw = answer.content[int(answer.headers["inference-header-content-length"]) :]
    actual = np.frombuffer(raw, np.float32).reshape(2, 3)
    np.testing.assert_allclose(actual, expected(trained_checkpoint, images), atol=1e-4)


def test_concurrent_requests_get_own_answers(
    server: Server, sealed: Path, trained_checkpoint: Path
) -> None:
    asked = [some(9), *(some(1 + number % 3, number) for number in range(24))]
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda one: server.ask({"id": f"{one.sum()}", **asking(one)}).json(), asked)
        )
    for images, answer in zip(asked, answers, strict=True):
        assert (answer["model_name"], answer["id"]) == ("squares", f"{images.sum()}")
        assert answer["model_version"] == bundle.version(sealed)
        np.testing.assert_allclose(logits(answer), expected(trained_checkpoint, images), atol=1e-4)
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    assert 'request_predict_seconds_count{model_name="squares"}' in text
    assert 'kfp_ddp_served_bundle{file="model.onnx",name="squares",runtime="onnxruntime' in text
    sizes = re.findall(r'kfp_ddp_batch_images_bucket\{le="(?:4.0|\+Inf)"\} (\S+)', text)
    assert len(set(sizes)) == 1
    assert "/infer" not in server.log.read_text().partition("open http")[2]


def test_grpc_answer_equals_the_checkpoint(server: Server, trained_checkpoint: Path) -> None:
    pb = protocol()
    images = some(2)
    request = pb.ModelInferRequest(model_name="squares", raw_input_contents=[images.tobytes()])
    request.inputs.add(name="images", datatype="UINT8", shape=images.shape)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        ask = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        answer = ask(request, timeout=60)
        request.inputs[0].datatype = "FP32"
        with pytest.raises(grpc.RpcError) as refused:
            ask(request, timeout=60)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    raw = answer.raw_output_contents
    actual = np.frombuffer(raw[0], np.float32) if raw else answer.outputs[0].contents.fp32_contents
    correct = expected(trained_checkpoint, images)
    np.testing.assert_allclose(np.reshape(actual, (2, 3)), correct, atol=1e-4)


def protocol() -> Any:
    """Import only KServe's messages: the package parses the program's arguments."""
    package = importlib.util.find_spec("kserve")
    assert package
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0], "protocol/grpc/grpc_predict_v2_pb2.py")
    spec = importlib.util.spec_from_file_location("grpc_predict_v2_pb2", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_metadata_and_health_follow_the_protocol(server: Server) -> None:
    described = requests.get(server.model, timeout=60).json()
    shape = [-1, 3, SIZE, SIZE]
    assert described["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": shape}]
    assert described["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}]
    assert requests.get(f"{server.model}/ready", timeout=60).json()["ready"] is True
    assert requests.get(f"{server.url}/v2/health/live", timeout=60).json() == {"live": True}
    assert requests.head(server.url, timeout=60).status_code == 200  # as KServe's server


def test_other_names_of_this_machine_are_refused(server: Server) -> None:
    for host, expected in (("localhost", 200), ("[::1]:1", 200), ("evil.example", 400)):
        asked = requests.get(server.model, headers={"host": host}, timeout=60)
        assert asked.status_code == expected


IMAGE = some(1)
WRONG: dict[str, Any] = {
    "another name": asking(IMAGE, name="picture"),
    "another type": asking(IMAGE, datatype="FP32"),
    "another size": asking(some(1)[..., :8]),
    "no image": asking(some(0)),
    "too few bytes": asking(IMAGE, data=[1, 2, 3]),
    "no bytes": asking(IMAGE, data=[256] * IMAGE.size),
    "fractions": asking(IMAGE, data=[0.5] * IMAGE.size),
    "no picture": asking(IMAGE, datatype="BYTES", shape=[0], data=[]),
    "no picture file": asking(IMAGE, datatype="BYTES", shape=[1], data=["aGVsbG8="]),
    "no base64": asking(IMAGE, datatype="BYTES", shape=[1], data=["picture.jpg"]),
    "two inputs": {"inputs": asking(IMAGE)["inputs"] * 2},
    "none": {"inputs": []},
    "another output": {**asking(IMAGE), "outputs": [{"name": "classes"}]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_invalid_request_gets_the_expected_input(server: Server, wrong: dict[str, Any]) -> None:
    refused = server.ask(wrong)
    assert refused.status_code == 400, refused.text
    text = refused.json()["error"]
    assert "\n" not in text
    is_bytes = wrong["inputs"][:1] and wrong["inputs"][0]["datatype"] == "BYTES"
    picture = is_bytes and ("BYTES" in text or "cannot read the picture" in text)
    assert "UINT8" not in text if picture else "UINT8" in text or "there is 'logits'" in text
    assert server.ask(asking(IMAGE)).status_code == 200


def test_picture_gets_names_and_shares(server: Server, sealed: Path, tmp_path: Path) -> None:
    url, path = f"{server.url}/predict", tmp_path / "noise.png"
    Image.fromarray(np.moveaxis(some(1, 5)[0], 0, 2)).save(path)
    content = path.read_bytes()
    answer = requests.post(url, content, timeout=60).json()
    model = load(str(sealed))
    (shares,) = model([path])
    classes = [(one["class"], one["probability"]) for one in answer["classes"]]
    assert answer["version"] == bundle.version(sealed)
    assert [answer["sure"]] == model.thresholds.sure(model.scores([path]))
    assert classes == [(model.classes[at], near(shares[at])) for at in (-shares).argsort()]
    form = {"file": ("noise.png", content)}
    for kind in ("multipart", "Multipart"):
        asked = requests.Request("POST", url, files=form).prepare()
        asked.headers["content-type"] = asked.headers["content-type"].replace("multipart", kind)
        with requests.Session() as session:
            assert session.send(asked, timeout=60).json() == answer
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 60) as leaving:
        leaving.sendall(b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nx")
    text = base64.b64encode(content).decode()
    texts = [text, base64.encodebytes(content).decode(), f"data:image/png;base64,{text}"]
    texts.append(base64.urlsafe_b64encode(content).decode().rstrip("="))
    files = asking(IMAGE, datatype="BYTES", shape=[4], data=texts)
    assert_computed_alike(softmax(logits(server.ask(files).json())), np.tile(shares, (4, 1)))
    page = io.BytesIO()
    Image.new("1", (4960, 7016), 1).save(page, "TIFF", compression="group4")
    scanned = requests.post(url, page.getvalue(), timeout=60)
    assert scanned.status_code == 200, scanned.text
    wrong: list[dict[str, Any]] = [{"data": content[:90]}, {"files": {"a": "text"}}, {}]
    palette = bytearray(content[:25] + b"\3" + content[26:])  # without its palette
    palette[29:33] = zlib.crc32(palette[12:29]).to_bytes(4)
    wrong.append({"data": bytes(palette)})
    wrong.append({"files": [("a", ("a.png", content)), ("b", ("b.png", content))]})
    for more in wrong:
        refused = requests.post(url, timeout=60, **more)
        assert (refused.status_code, list(refused.json())) == (400, ["error"])
    assert "Traceback" not in server.log.read_text()


def test_a_picture_may_be_as_large_as_in_the_training(sealed: Path, tmp_path: Path) -> None:
    scan = tmp_path / "scan.tif"
    Image.new("1", (500, 700), 1).save(scan, compression="group4")
    few = Path(shutil.copytree(sealed, tmp_path / "few"))
    signature = json.loads((few / "signature.json").read_text())
    assert signature["preprocessing"]["max_pixels"] == MAX_PIXELS
    signature["preprocessing"]["max_pixels"] = 349_999
    bundle.write_json(few / "signature.json", signature)
    bundle.seal(few)
    load(str(sealed))([scan])
    with pytest.raises(InputError, match=r"max_pixels=349999: .* serve by --max-pixels"):
        load(str(few))([scan])
    for own, most in ((None, 349_999), (350_000, 350_000)):
        assert ready(str(few), max_pixels=own).interface.reading.max_pixels == most


def test_too_large_request_is_refused_before_it_is_complete(server: Server) -> None:
    parts = iter([bytes(MAX_JSON // 4)] * 5)
    headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
    asked = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    with contextlib.closing(asked):
        asked.request("POST", "/v2/models/squares/infer", parts, headers, encode_chunked=True)
        refused = asked.getresponse()
        assert (refused.status, "send fewer images" in refused.read().decode()) == (413, True)
    assert server.ask(asking(IMAGE)).status_code == 200


START = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
FLOODS = {
    "request line": (b"GET /", b"a" * 4096),
    "name": (START, b"a" * 4096),
    "value": (START + b"a: ", b"a" * 4096),
    "headers": (START, b"a: a\r\n" * 1024),
    "long headers": (START, b"a: %b\r\n" % (b"a" * 4096)),
    "trailer": (CHUNKED + b"0\r\na: ", b"a" * 4096),
    "trailers": (CHUNKED + b"0\r\n", b"a: a\r\n" * 1024),
    "chunk extension": (CHUNKED + b"1;", b"a" * 4096),
    "chunk size": (CHUNKED, b"0" * 4096),
    "pipeline": (b"", (START + b"\r\n") * 512),
    "pipelined bodies": (b"", b"".join((CHUNKED, b"40000\r\n", b"a" * 0x40000, b"\r\n0\r\n\r\n"))),
    "upgrade": (START + b"connection: upgrade\r\nupgrade: a\r\n\r\n", b"a" * 4096),
}
"""What a request begins with, and what follows without end."""


def memory(server: Server, name: str) -> int:
    """Return the memory of a server in MiB: VmRSS, or VmHWM for the most so far."""
    text = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) >> 10


def reset_peak(server: Server) -> int:
    """Let VmHWM begin anew; return the memory now."""
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    return memory(server, "VmRSS")


@pytest.mark.parametrize("flood", FLOODS)
def test_request_without_end_takes_no_memory(flood: str, server: Server) -> None:
    begin, piece = FLOODS[flood]
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))

    def send(_: int) -> int:
        sent, most = 0, 16 << 20
        with socket.create_connection(address, 60) as client:
            try:
                client.sendall(begin)
                while sent < most:
                    client.sendall(piece)
                    sent += len(piece)
            except (ConnectionError, TimeoutError):
                return 0
        return sent

    before = reset_peak(server)
    with ThreadPoolExecutor(16) as clients:
        sent = sum(clients.map(send, range(16)))
    assert memory(server, "VmHWM") - before < 64
    assert sent == 0
    assert requests.get(f"{server.url}/v2/health/live", timeout=60).status_code == 200


def test_few_headers_of_64_kib_are_answered_and_more_are_refused(server: Server) -> None:
    for size, code in ((60_000, 200), (66_000, 431)):
        headers = {"a": "a" * size}
        answer = requests.get(f"{server.url}/v2/health/live", headers=headers, timeout=60)
        assert answer.status_code == code
    for number, code in ((100, 200), (200, 431)):
        headers = {f"a{one}": "a" for one in range(number)}
        answer = requests.get(f"{server.url}/v2/health/live", headers=headers, timeout=60)
        assert answer.status_code == code


def test_many_large_messages_of_grpc_take_bounded_memory(server: Server) -> None:
    pb = protocol()
    images = some(8_000_000 // (3 * SIZE * SIZE))
    request = pb.ModelInferRequest(model_name="squares", raw_input_contents=[images.tobytes()])
    request.inputs.add(name="images", datatype="FP32", shape=images.shape)  # is refused when read
    content = request.SerializeToString()
    before = reset_peak(server)
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        calls = [ask.future(content, timeout=120) for _ in range(100)]
        codes = {call.code() for call in calls}
        assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
        assert memory(server, "VmHWM") - before < 1024  # 2,700 without a limit
        silent = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        assert silent.future(iter(())).code() == grpc.StatusCode.INVALID_ARGUMENT
    assert server.ask(asking(IMAGE)).status_code == 200


def test_clients_cannot_unload_the_model(server: Server) -> None:
    for verb in ("load", "unload"):
        url = f"{server.url}/v2/repository/models/squares/{verb}"
        assert requests.post(url, timeout=60).status_code == 501
    assert requests.get(f"{server.url}/v2/models/other", timeout=60).status_code == 404
    v1 = requests.post(f"{server.url}/v1/models/squares:predict", json={"instances": []}, timeout=9)
    assert (v1.status_code, "only v2 is spoken" in v1.text) == (400, True)
    assert server.ask(asking(IMAGE)).status_code == 200


@pytest.mark.slow
def test_the_server_answers_while_its_pod_stops(
    sealed: Path, trained_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    images = some(3)
    body = json.dumps(asking(images)).encode()
    head = (
        "POST /v2/models/blue/infer HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "expect: 100-continue\r\n\r\n"
    )
    with served(str(sealed), tmp_path, "--name", "blue") as server:
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 60) as asked:
            asked.sendall(head.encode())
            assert asked.recv(100).startswith(b"HTTP/1.1 100 Continue")
            server.process.send_signal(signal.SIGTERM)
            until(lambda: "SIGTERM: taking requests" in server.log.read_text())
            late = requests.get(f"{server.url}/v2/models/blue", timeout=60)
            with contextlib.suppress(ConnectionError):  # refused, or reset as it stops to listen
                while True:
                    socket.create_connection(("127.0.0.1", port), 60).close()
            asked.sendall(body)
            answer = b"".join(iter(lambda: asked.recv(1 << 16), b""))
        assert server.process.wait(60) == 0
    assert late.status_code == 200
    assert answer.startswith(b"HTTP/1.1 200 OK")
    actual = logits(json.loads(answer.partition(b"\r\n\r\n")[2]))
    np.testing.assert_allclose(actual, expected(trained_checkpoint, images), atol=1e-4)
    assert "model.onnx in onnxruntime" in server.log.read_text()


def test_damaged_bundle_is_not_loaded(sealed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sealed, tmp_path / "copy"))
    for name in (bundle.ONNX, "classes.json", "sample/response.json"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-9] + b"x" + content[-8:])
        with pytest.raises(InputError, match=f"is damaged: {name} is not what MANIFEST"):
            ready(str(copy))
        (copy / name).write_bytes(content)
    ready(str(copy))


def test_model_of_other_images_than_described_is_not_served(sealed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sealed, tmp_path / "copy"))
    for side in (SIZE + 1, "height"):
        model = onnx.load(copy / bundle.ONNX)
        dim = model.graph.input[0].type.tensor_type.shape.dim[2]
        if isinstance(side, int):
            dim.dim_value = side
        else:
            dim.dim_param = side
        onnx.save(model, copy / bundle.ONNX)
        bundle.seal(copy)
        with pytest.raises(InputError, match=rf"model\.onnx takes images \[3, .*, {SIZE}\], not"):
            ready(str(copy))


def test_model_with_a_wrong_sample_is_not_served(sealed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(sealed, tmp_path / "copy"))
    described = json.loads((copy / "sample" / "response.json").read_text())
    for wrong in (described["outputs"][0]["data"][0] + 0.01, float("nan")):
        described["outputs"][0]["data"][0] = wrong
        (copy / "sample" / "response.json").write_text(json.dumps(described))
        bundle.seal(copy)
        with pytest.raises(InputError, match=r"does not answer the|response.json cannot be used"):
            ready(str(copy))
    shutil.rmtree(copy / "sample")
    (copy / "MANIFEST.sha256").unlink()
    (copy / "_SUCCESS").unlink()
    bundle.seal(copy)
    assert ready(str(copy)).sealed.model_name == "squares"


def test_invalid_bundle_or_port_is_one_line(sealed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no bundle at"):
        ready(str(tmp_path))
    (tmp_path / "CHAMPION").write_text("0123456789ab\n")
    with pytest.raises(InputError, match="/0123456789ab, which does not exist"):
        ready(str(tmp_path))
    for variant, why in (("int8", ""), ("resize", r" \(retired: leave --variant out.*\)")):
        with pytest.raises(InputError, match=f"no variant {variant} to serve{why}: it has none"):
            ready(str(sealed), variant=variant)
    with pytest.raises(InputError, match=r"write gs://my-bucket/models"):
        ready("my-bucket/models")
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused("serve", sealed, "--port", port)


def test_rollout_compares_the_answer_with_the_bundle(server: Server, sealed: Path) -> None:
    sample = sample_of(Bundle.at(open_store(str(sealed)), "", "the bundle", "export it"))
    assert check_canary(server.url, "squares", sample, 2, 60) > 0
