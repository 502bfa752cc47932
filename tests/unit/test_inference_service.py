"""InferenceServices for a bundle, held to KServe's own schema."""

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
from tests import kserve

BUNDLE = "gs://models/exports/flowers/0123456789ab"


def made(runtime: str, **more: Any) -> dict[str, Any]:
    image: dict[str, Any] = {"image": "ghcr.io/you/server:1"} if runtime == OURS else {}
    return manifest("shop", BUNDLE, "flowers", runtime, **image, **more)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_kserve_takes_each_of_them(runtime: str) -> None:
    limits = {"limits": {"cpu": 2, "memory": "4Gi"}}
    more = {"namespace": "team", "service_account": "reader", "resources": limits}
    assert kserve.faults(made(runtime)) == []
    told = made(runtime, **more)
    assert kserve.faults(told) == []
    assert told["metadata"] == {"name": "shop", "namespace": "team"}
    predictor = told["spec"]["predictor"]
    assert predictor["serviceAccountName"] == "reader"
    at = predictor.get("model") or predictor["containers"][0]
    assert at["resources"] == limits


def test_what_kserve_does_not_know_is_seen() -> None:
    wrong = made(TRITON)
    wrong["spec"]["predictor"]["model"]["protocol"] = "v2"
    assert "'protocol' was unexpected" in str(kserve.faults(wrong))
    wrong = made(TRITON)
    del wrong["spec"]["predictor"]["model"]["modelFormat"]["name"]
    assert "'name' is a required property" in str(kserve.faults(wrong))


def test_each_runtime_is_given_the_part_of_the_bundle_that_it_reads() -> None:
    triton = made(TRITON)["spec"]["predictor"]["model"]
    assert triton["storageUri"] == f"{BUNDLE}/serving"
    assert (triton["protocolVersion"], triton["runtime"]) == ("v2", TRITON)
    openvino = made(OPENVINO)["spec"]["predictor"]["model"]
    assert openvino["storageUri"] == f"{BUNDLE}/serving/flowers"
    assert openvino["args"] == ['--plugin_config={"INFERENCE_PRECISION_HINT":"f32"}']
    ours = made(OURS)["spec"]["predictor"]["containers"][0]
    assert {"name": "STORAGE_URI", "value": BUNDLE} in ours["env"]
    assert ours["command"][:3] == ["kfp-ddp", "serve", "/mnt/models"]


def test_openvino_model_server_calls_the_model_as_the_service() -> None:
    names = {runtime: served_name("shop", "flowers", runtime) for runtime in RUNTIMES}
    assert names == {TRITON: "flowers", OPENVINO: "shop", OURS: "flowers"}


def test_addresses_are_those_that_kserve_reads(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_addresses_that_it_does_not_read_are_refused(
    monkeypatch: pytest.MonkeyPatch, bundle: str, why: str
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT", raising=False)
    with pytest.raises(InputError, match=why):
        storage_uri(bundle)


def test_a_runtime_needs_to_be_there_and_ours_an_image() -> None:
    with pytest.raises(InputError, match="runtime is 'triton': give one of kserve-tritonserver"):
        made("triton")
    with pytest.raises(InputError, match="needs an image"):
        manifest("shop", BUNDLE, "flowers", OURS)
