"""What a sync says over TLS, and how often it has to introduce itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kfp_ddp.datasets.options import Options
from kfp_ddp.datasets.sync import sync
from kfp_ddp.datasets.transfer import SMALL
from kfp_ddp.storage.http import origin
from tests import tls
from tests.gcs_server import Bucket, serve
from tests.sync_runs import RETRY, content

FILES = {f"{number:02}": bytes([number]) * 20_000 for number in range(40)}
FILES |= {f"large-{number}": bytes([number]) * (SMALL + 5) for number in range(4)}


@pytest.fixture
def secure_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket that only speaks TLS, and its certificate is trusted."""
    bucket, certificate = Bucket(), tls.loopback_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    origin.tls.cache_clear()
    with serve(bucket, tls.server_context(certificate)) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        yield bucket
    origin.tls.cache_clear()


def test_certificate_is_looked_at_once_for_all_connections(
    secure_bucket: Bucket, tmp_path: Path
) -> None:
    for name, body in FILES.items():
        secure_bucket.put(f"ds/{name}", body)
    secure_bucket.delay = 0.01
    target = tmp_path / "target"
    version = sync("gs://bucket/ds", target, Options(concurrency=6, timeout=5), retry=RETRY).path
    assert content(version) == FILES
    made = origin.tls("").session_stats()
    assert made["connect_good"] > 4
    assert made["connect_good"] - made["hits"] == 1, "the others go on from the first one's session"


def test_server_may_keep_no_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, certificate = Bucket(), tls.loopback_certificate(tmp_path)
    for name, body in FILES.items():
        bucket.put(f"ds/{name}", body)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    origin.tls.cache_clear()
    context = tls.server_context(certificate)
    context.num_tickets = 0
    with serve(bucket, context) as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        version = sync("gs://bucket/ds", tmp_path / "t", Options(concurrency=6), retry=RETRY).path
    assert content(version) == FILES
    assert not origin.tls("").session_stats()["hits"]
    origin.tls.cache_clear()
