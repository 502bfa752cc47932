"""InferenceServices for a bundle; the tests on a cluster give them to KServe."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.serving.inference_service import (
    OPENVINO,
    OURS,
    RUNTIMES,
    TRITON,
    manifest,
    served_name,
    storage_uri,
)

BUNDLE = "gs://models/exports/flowers/0123456789ab"


def make(runtime: str, **more: Any) -> dict[str, Any]:
    image: dict[str, Any] = {"image": "ghcr.io/you/server:1"} if runtime == OURS else {}
    return manifest("shop", BUNDLE, "flowers", runtime, **image, **more)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_manifest_has_what_it_was_given(runtime: str) -> None:
    limits = {"limits": {"cpu": 2, "memory": "4Gi"}}
    service = make(runtime, service_account="reader", resources=limits)
    assert service["metadata"] == {"name": "shop"}
    predictor = service["spec"]["predictor"]
    assert predictor["serviceAccountName"] == "reader"
    server = predictor.get("model") or predictor["containers"][0]
    assert server["resources"] == limits


def test_each_runtime_gets_its_part_of_the_bundle() -> None:
    triton = make(TRITON)["spec"]["predictor"]["model"]
    assert triton["storageUri"] == f"{BUNDLE}/serving"
    assert (triton["protocolVersion"], triton["runtime"]) == ("v2", TRITON)
    openvino = make(OPENVINO)["spec"]["predictor"]["model"]
    assert openvino["storageUri"] == f"{BUNDLE}/serving/flowers"
    assert openvino["args"] == ['--plugin_config={"INFERENCE_PRECISION_HINT":"f32"}']
    ours = make(OURS)["spec"]["predictor"]["containers"][0]
    assert {"name": "STORAGE_URI", "value": BUNDLE} in ours["env"]
    assert ours["command"][:3] == ["kfp-ddp", "serve", "/mnt/models"]


def test_openvino_model_server_names_the_model_after_the_service() -> None:
    names = {runtime: served_name("shop", "flowers", runtime) for runtime in RUNTIMES}
    assert names == {TRITON: "flowers", OPENVINO: "shop", OURS: "flowers"}


def test_addresses_are_translated_for_kserve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert storage_uri("s3://b/models/x/") == "s3://b/models/x"
    assert storage_uri("pvc://claim/runs/1/bundle") == "pvc://claim/runs/1/bundle"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "shop")
    assert storage_uri("az://models/x") == "https://shop.blob.core.windows.net/models/x"


@pytest.mark.parametrize(
    ("bundle", "why"),
    [
        ("az://models/x", "set AZURE_STORAGE_ACCOUNT"),
        ("./bundle", "KServe cannot read ./bundle"),
        ("file:///bundle", "KServe cannot read file:///bundle"),
        ("gs://", "KServe cannot read gs:"),
        ("", "KServe cannot read"),
    ],
)
def test_others_are_refused(monkeypatch: pytest.MonkeyPatch, bundle: str, why: str) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(InputError, match=why):
        storage_uri(bundle)


def test_an_unknown_runtime_and_ours_without_an_image_are_refused() -> None:
    with pytest.raises(InputError, match="runtime is 'triton': give one of kserve-tritonserver"):
        make("triton")
    with pytest.raises(InputError, match="needs an image"):
        manifest("shop", BUNDLE, "flowers", OURS)
