"""What a release names to be signed and registered with, before anything is trained."""

import pytest

from kfp_ddp.checks.preflight import check_release
from kfp_ddp.core.errors import InputError, StorageError
from tests.registry_server.server import RegistryServer, status


def test_nothing_named_is_nothing_to_look_at() -> None:
    check_release({"variants": ["fp16"]}, "")


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ({"sign_key": "signing.pem"}, r"sign_key names the key signing\.pem, which the bucket's"),
        ({"sign_key": "sick.pem"}, r"sign_key \(sick\.pem\) is not a private key"),
        ({"registry": "http://x"}, "release names the registry http://x, and no destination"),
        ({"registry": "http://x", "registry_token": "word"}, "registry_token names the key word"),
    ],
)
def test_what_cannot_be_used_is_refused(
    release: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("sick.pem", "-----BEGIN")
    with pytest.raises(InputError, match=words):
        check_release(release, "")


def test_a_registry_that_is_down_is_told_and_none_that_answers(
    registry_server: RegistryServer,
) -> None:
    check_release({"registry": registry_server.url}, "gs://models")
    registry_server.fail("*", status(503))
    with pytest.raises(StorageError, match=r"refused .*\(503: injected\)"):
        check_release({"registry": registry_server.url}, "gs://models")
