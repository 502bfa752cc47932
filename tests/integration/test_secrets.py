"""No step prints a secret, since KFP shows the logs of a run to every user."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kfp_ddp.storage.kinds import open_store
from tests.local_pipeline import pipeline
from tests.photographs import plain

pytestmark = pytest.mark.slow
COMPILED = Path(__file__).parents[2] / "compiled"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "hidden-secret-access-key",
    "AWS_SESSION_TOKEN": "hidden-session-token",
    "HF_TOKEN": "hf_hiddentoken",
    "MLFLOW_TRACKING_PASSWORD": "hidden-mlflow-password",
    "MLFLOW_TRACKING_TOKEN": "hidden-mlflow-token",
    "HOOK": "http://127.0.0.1:9/hidden-hook",
}
LOUD = "import logging; logging.basicConfig(level=logging.DEBUG)"


def test_no_step_prints_a_secret(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photographs, source = plain(tmp_path / "photographs", 16), open_store("s3://bucket/shades")
    for path in photographs.rglob("*.*"):
        source.put(path, path.relative_to(photographs).as_posix())
    key = ec.generate_private_key(ec.SECP256R1())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LOUD)
    loud = {"NCCL_DEBUG": "TRACE", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    loud["PYTHONPATH"] = str(tmp_path / "site")
    for name, content in {**SECRETS, "signing.pem": pem, **loud}.items():
        monkeypatch.setenv(name, content)
    arguments = {
        "source": "s3://bucket/shades",
        "sync": {"dataset": "shades"},
        "destination": "s3://bucket/models",
        "model_name": "shades",
        "model": "cifar_resnet8",
        "epochs": 1,
        "training": {"image_size": 16, "workers": 0, "val_fraction": 0.25, "warmup_epochs": 0.0},
        "backend": "local",
        "job": {"nproc_per_node": 1, "notify_webhook": "HOOK"},
        "release": {"sign_key": "signing.pem"},
    }
    done = pipeline(arguments, tmp_path, COMPILED / "train_resnet.yaml")
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-3000:]
    assert "DEBUG:" in printed  # before a step adopts the secrets
    lines = [*SECRETS.values(), "hidden-hook", *pem.splitlines()[1:-1]]
    leaked = {secret: line for secret in lines for line in printed.splitlines() if secret in line}
    assert not leaked
    for path in tmp_path.joinpath("artifacts").rglob("*"):
        assert not path.is_file() or not any(one.encode() in path.read_bytes() for one in lines)
