"""Signatures of bundles: which ones are valid, and what they cover."""

import base64
import importlib.resources
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from kfp_ddp.core.errors import InputError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle, signature
from kfp_ddp.models.bundle import local_bundle
from kfp_ddp.models.champion import open_bundle
from kfp_ddp.models.release import Signing
from kfp_ddp.storage.kinds import open_store
from tests.commands import call, refused
from tests.exports import exported

KEYS: dict[str, Any] = {
    "P-256": ec.generate_private_key(ec.SECP256R1()),
    "P-384": ec.generate_private_key(ec.SECP384R1()),
    "P-521": ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate(),
}
KEY, OTHER = KEYS["P-256"], ec.generate_private_key(ec.SECP256R1())


def pem(key: Any, password: str = "") -> bytes:
    """Return the text of a private key."""
    encryption: KeySerializationEncryption = NoEncryption()
    if password:
        encryption = BestAvailableEncryption(password.encode())
    text: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
    return text


def public(key: Any) -> bytes:
    """Return the text of the public key."""
    text: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return text


def make(tmp_path: Path, key: Any = None) -> Path:
    """Return the folder of a bundle, signed if there is a key."""
    folder = tmp_path / "bundle"
    exported(open_store(str(tmp_path / "models")), "flowers", folder, 3, Lineage("r1"))
    if key is not None:
        signature.sign(folder, key)
    return folder


def check(folder: Path, key: Any = KEY) -> None:
    signature.check(local_bundle(folder), signature.key_signer(key.public_key()))


@pytest.mark.parametrize("own", ["cats", "flowers"])
def test_a_champion_of_another_model_is_refused(tmp_path: Path, own: str) -> None:
    if own == "cats":  # the other one has no ONNX, so that only the config names the model
        (tmp_path / "bundle" / "serving" / own).mkdir(parents=True)
        (tmp_path / "bundle" / "serving" / own / "config.pbtxt").write_text("")
    folder, signer = make(tmp_path, KEY), signature.key_signer(KEY.public_key())
    version = bundle.version(folder)
    for name in (own, "dogs"):
        uri = bundle.upload(folder, name, open_store(str(tmp_path / "b")))
        (tmp_path / "b" / name / "CHAMPION").write_text(version)
        assert open_bundle(uri, signer=signer).model_name == own
    assert open_bundle(str(tmp_path / "b" / own), signer=signer).version == version
    with pytest.raises(InputError, match=f"is of the model {own}: do not use it"):
        open_bundle(str(tmp_path / "b" / "dogs"), signer=signer)


@pytest.mark.parametrize("kind", KEYS)
def test_a_signature_is_valid_for_its_key_only(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path, KEYS[kind])
    check(folder, KEYS[kind])
    with pytest.raises(InputError, match=r"model\.sig was made by another key"):
        check(folder, OTHER)
    check(Path(bundle.upload(folder, "flowers", open_store(str(tmp_path / "b")))), KEYS[kind])
    before = (folder / bundle.SIGNATURE).read_bytes()
    signature.sign(folder, KEYS[kind])
    assert (folder / bundle.SIGNATURE).read_bytes() == before
    signature.sign(folder, OTHER)
    check(folder, OTHER)


def reseal(folder: Path, change: str) -> None:
    """Change a signed bundle and its manifest, as a writer without the key."""
    content = (folder / bundle.SIGNATURE).read_bytes()
    if change == "gone":
        (folder / "model.safetensors").unlink()
    else:
        (folder / {"changed": "model.safetensors", "more": "more"}[change]).write_bytes(b"mine")
    for name in (bundle.MANIFEST, bundle.SUCCESS):
        (folder / name).unlink()
    bundle.seal(folder)
    with pytest.raises(InputError, match=r"is not signed: it has no model\.sig"):
        check(folder)
    (folder / bundle.SIGNATURE).write_bytes(content)
    assert bundle.intact(folder)


@pytest.mark.parametrize("change", ["changed", "more", "gone"])
def test_a_changed_bundle_with_a_new_manifest_is_refused(tmp_path: Path, change: str) -> None:
    folder = make(tmp_path, KEY)
    reseal(folder, change)
    with pytest.raises(InputError, match=r"MANIFEST\.sha256 differs from the signed one"):
        check(folder)


def test_the_signature_is_checked_for_the_manifest_that_was_read(tmp_path: Path) -> None:
    """Who can write to the bundle shows another manifest first, and the signed one later."""
    folder = make(tmp_path, KEY)
    signed = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    reseal(folder, "changed")
    opened = local_bundle(folder)
    for path, content in signed.items():
        path.write_bytes(content)
    check(folder)
    with pytest.raises(InputError, match=r"MANIFEST\.sha256 differs from the signed one"):
        signature.check(opened, signature.key_signer(KEY.public_key()))


@pytest.mark.parametrize("words", [("serve", "--manifest", "kserve-tritonserver"), ("verify",)])
def test_commands_require_the_signature_of_a_key(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = make(tmp_path)
    key = tmp_path / "key.pub"
    key.write_bytes(public(KEY))
    assert "is not signed" in refused(*words, folder, "--key", key)
    signature.sign(folder, KEY)
    # A local folder is served by no InferenceService.
    assert "is not signed" not in str(call(*words, folder, "--key", key).exception)


def envelope(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / bundle.SIGNATURE).read_text())
    return content


def test_a_flipped_bit_makes_a_signature_invalid(tmp_path: Path) -> None:
    folder = make(tmp_path, KEY)
    for name in ("payload", "sig"):
        whole = envelope(folder)
        inner = whole["dsseEnvelope"]
        inner = inner["signatures"][0] if name == "sig" else inner
        content = bytearray(base64.b64decode(inner[name]))
        content[len(content) // 2] ^= 1
        inner[name] = base64.b64encode(content).decode()
        with pytest.raises(InputError, match="was made not by this key"):
            signature.check(
                local_bundle(folder),
                signature.key_signer(KEY.public_key()),
                json.dumps(whole).encode(),
            )


SIGNED = '{"verificationMaterial": {%s}, "dsseEnvelope": {%s}}'
TYPE = '"payloadType": "application/vnd.in-toto+json"'
ENVELOPE = f'"payload": "e30=", {TYPE}, "signatures": [{{"sig": "e30="}}]'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not a signature by a key"),
        ('{"verificationMaterial": {}, "dsseEnvelope": {}}', "not a signature by a key"),
        (SIGNED % ('"publicKey": 1', '"payload": "e30="'), "not a signature by a key"),
        (SIGNED % ("", '"payload": "!", "signatures": []'), "not a signature by a key"),
        (SIGNED % ('"publicKey": {"hint": 7}', ENVELOPE), "was made by another key, 7"),
    ],
)
def test_an_invalid_signature_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    folder = make(tmp_path)
    (folder / bundle.SIGNATURE).write_text(content)
    with pytest.raises(InputError, match=words):
        check(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (b"1", "does not sign a model"),
        (b'{"_type": "x", "predicateType": "y"}', "does not sign a model"),
        ({"model.safetensors": ""}, r"model\.safetensors is not signed"),
        ({"more": "0" * 64}, "more, which is signed, is missing"),
        ({"model.safetensors": "0" * 64}, r"model\.safetensors differs from the signed one"),
    ],
)
def test_other_statements_fail(tmp_path: Path, change: bytes | dict[str, str], words: str) -> None:
    folder = make(tmp_path)
    payload: Any = change
    if isinstance(change, dict):
        files = local_bundle(folder).signed_files | change
        payload = signature._statement("x", {name: sha for name, sha in files.items() if sha})
    (folder / bundle.SIGNATURE).write_bytes(signature._sign(payload, KEY))
    with pytest.raises(InputError, match=words):
        check(folder)


@pytest.fixture
def model_signing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library of OpenSSF Model Signing.

    1.1 imports pyOpenSSL, for certificates only, without declaring it.
    """
    for name in ("OpenSSL", "OpenSSL.crypto"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["OpenSSL"], "crypto", sys.modules["OpenSSL.crypto"], False)
    import model_signing

    return model_signing


@pytest.mark.parametrize("kind", ["P-256", "P-384", "P-521"])
def test_openssf_accepts_our_signature(tmp_path: Path, model_signing: Any, kind: str) -> None:
    folder = make(tmp_path, KEYS[kind])
    (tmp_path / "key.pub").write_bytes(public(KEYS[kind]))

    def verify() -> None:
        verifier = model_signing.verifying.Config()
        verifier.use_elliptic_key_verifier(public_key=tmp_path / "key.pub")
        verifier.verify(folder, folder / bundle.SIGNATURE)

    verify()
    (folder / "model.safetensors").write_bytes(bytes(99))
    with pytest.raises(ValueError, match="Hash mismatch for 'model"):
        verify()


def test_a_signature_of_openssf_is_accepted(tmp_path: Path, model_signing: Any) -> None:
    folder = make(tmp_path)
    (tmp_path / "key").write_bytes(pem(KEY))
    signer = model_signing.signing.Config().use_elliptic_key_signer(private_key=tmp_path / "key")
    signer.sign(folder, folder / bundle.SIGNATURE)
    check(folder)
    with pytest.raises(InputError, match="was made by another key"):
        check(folder, OTHER)


@pytest.mark.parametrize("password", ["", "open sesame"])
def test_the_key_comes_from_the_secret(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    monkeypatch.setenv("signing.pem", pem(KEY, password).decode())
    monkeypatch.setenv("signing.word", password)
    word = "signing.word" if password else ""
    key = signature.key_of(Signing(sign_key="signing.pem", sign_password=word))
    assert key is not None
    assert signature.fingerprint(key.public_key()) == signature.fingerprint(KEY.public_key())
    assert signature.key_of(Signing()) is None


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        ("", "sign_key names the key signing.pem, which the bucket's secret"),
        (public(KEY).decode(), "is not a private key: give an EC key.*with no password"),
        (pem(KEY, "word").decode(), "is not a private key: .*with the right password"),
        (pem(rsa.generate_private_key(65537, 1024)).decode(), "a key of another kind"),
        (pem(ec.generate_private_key(ec.SECP256K1())).decode(), "a key of another kind"),
    ],
)
def test_a_secret_without_a_key(monkeypatch: pytest.MonkeyPatch, secret: str, words: str) -> None:
    monkeypatch.setenv("signing.pem", secret)
    with pytest.raises(InputError, match=words) as caught:
        signature.key_of(Signing(sign_key="signing.pem"))
    assert "PRIVATE" not in str(caught.value)


def test_a_private_or_invalid_key_is_no_public_key() -> None:
    signature.public_key(public(KEYS["Ed25519"]), "--key")
    with pytest.raises(InputError, match="--key is not a public key: openssl pkey -in KEY -pubout"):
        signature.public_key(pem(KEY), "--key")
    with pytest.raises(InputError, match="--key is not a public key: give an EC key on P-256"):
        signature.public_key(b"x", "--key")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of trust for the public instance of Sigstore."""
    store = Path(str(importlib.resources.files("sigstore._store")))
    (root,) = (
        path for path in store.rglob("trusted_root.json") if "repo-cdn.sigstore" in str(path)
    )
    return root


def test_a_signature_by_key_is_not_one_of_an_identity(tmp_path: Path, root: Path) -> None:
    folder = make(tmp_path, KEY)
    signer = signature.identity_signer("ana@example.com", "https://accounts.example.com", root)
    opened = local_bundle(folder)
    for content in (None, b"{}", b"no"):
        with pytest.raises(
            InputError, match=r"no valid signature of ana@example\.com at https\S+: model\.sig is"
        ):
            signature.check(opened, signer, content)


def test_statement_is_compared(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verification by Sigstore is replaced: it needs its log and a login."""
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.verify import Verifier

    folder = make(tmp_path, KEY)
    payload = base64.b64decode(envelope(folder)["dsseEnvelope"]["payload"])
    monkeypatch.setattr(SigstoreBundle, "from_json", lambda _: None)
    monkeypatch.setattr(
        Verifier, "verify_dsse", lambda *_, **__: ("application/vnd.in-toto+json", payload)
    )
    signer = signature.identity_signer("ana@example.com", "https://accounts.example.com", root)
    signature.check(local_bundle(folder), signer)
    reseal(folder, "changed")
    with pytest.raises(InputError, match=r"MANIFEST\.sha256 differs from the signed one"):
        signature.check(local_bundle(folder), signer)


@pytest.mark.parametrize("content", [None, "", "{}", "no"])
def test_an_invalid_root_of_trust_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "root.json").write_text(content)
    with pytest.raises(InputError, match=r"Sigstore's root of trust: .* give --trust"):
        signature.identity_signer("ana@example.com", "https://x", tmp_path / "root.json")
