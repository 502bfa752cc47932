"""`kfp-ddp sign` and `kfp-ddp verify`: the files of a bundle, and its signature."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric import ec

from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.models.champion import move
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store
from tests.exports import exported
from tests.unit.test_signature import pem, public

KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A destination of each kind, with the model flowers, which has a champion."""
    found = open_store(str(tmp_path / "exports"))
    if request.param == "bucket":
        request.getfixturevalue("emulator")
        found = open_store("gs://models/exports")
    version = exported(found, "flowers", tmp_path / "made", 3, Lineage("run-1"))
    move(found, "flowers", version, "", "run-1")
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / f"{name}.pem").write_bytes(pem(key))
        (tmp_path / f"{name}.pub").write_bytes(public(key))
    return found


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: object) -> str:
    """Return the error of a call, one line, with exit code 2."""
    done = call(*words)
    assert isinstance(done.exception, InputError), done.output
    assert done.exception.exit_code == 2
    assert "\n" not in str(done.exception)
    return str(done.exception)


def test_a_published_bundle_is_signed_and_verified(where: Store, tmp_path: Path) -> None:
    exports = f"{where.uri}/flowers"
    version = bundle.version(tmp_path / "made")
    count = len(bundle.files(tmp_path / "made")) - 2
    output = call("verify", exports).output
    assert output == f"{exports}/{version}: complete, {count} files, 0.0 MB\nnot signed\n"
    assert "is not signed: it has no model.sig" in refused(
        "verify", exports, "--key", tmp_path / "key.pub"
    )
    done = call("sign", exports, "--key", tmp_path / "key.pem")
    assert done.exception is None, done.output
    assert f"{exports}/{version}: signed by the key " in done.output
    facts = json.loads(call("verify", exports, "--key", tmp_path / "key.pub", "--json").output)
    assert (facts["version"], facts["files"], facts["signed"]) == (version, count, True)
    at = facts["exported_at"]
    assert call("verify", exports, "--name", facts["name"], "--since", at).exception is None
    assert "not cats" in refused("verify", exports, "--name", "cats")
    assert f"was exported {at}" in refused("verify", exports, "--since", "2999-01-01")
    assert facts["by"] in done.output
    assert "signed, not checked" in call("verify", f"{exports}/{version}").output
    assert "was made by another key" in refused("verify", exports, "--key", tmp_path / "other.pub")


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_the_folder_of_a_run_is_accepted(where: Store, tmp_path: Path) -> None:
    (tmp_path / "made").rename(tmp_path / "exports" / "bundle")
    done = call("sign", where.uri, "--key", tmp_path / "key.pem")
    assert done.output.startswith(f"{where.uri}/bundle: signed by the key "), done.exception
    found = call("verify", where.uri, "--key", tmp_path / "key.pub")
    assert found.output.startswith(f"{where.uri}/bundle: complete, "), found.exception


@pytest.mark.parametrize("where", ["folder"], indirect=True)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("changed", "is damaged: model.safetensors is not what MANIFEST.sha256 lists; do not use"),
        ("gone", "is damaged: model.safetensors is missing; do not use it"),
        ("more", "is damaged: more is not in MANIFEST.sha256; do not use it"),
        ("outside", "is damaged: ../other is missing; do not use it"),
        ("unsealed", "is damaged: _SUCCESS is not the digest of MANIFEST.sha256"),
        ("pointer", "is damaged: MANIFEST.sha256 is that of "),
        ("link", "is damaged: serving/m/2 is not in MANIFEST.sha256"),
        ("pipe", "is damaged: pipe is not in MANIFEST.sha256"),
        ("hidden", "is damaged: .x.tmp is not in MANIFEST.sha256"),
        ("lock", "is damaged: .x.lock is not in MANIFEST.sha256"),
        ("empty", "is damaged: serving/m/3/ is not in MANIFEST.sha256"),
        ("linked", "cannot read"),
    ],
)
def test_any_changed_file_is_found(where: Store, tmp_path: Path, change: str, words: str) -> None:
    folder = tmp_path / "exports" / "flowers" / bundle.version(tmp_path / "made")
    call("sign", folder, "--key", tmp_path / "key.pem")
    match change:
        case "changed":
            (folder / "model.safetensors").write_bytes(bytes(99) + b"1")
        case "gone":
            (folder / "model.safetensors").unlink()
        case "more":
            (folder / "more").write_text("")
        case "outside":
            (folder.parent / "other").write_text("")
            with (folder / bundle.MANIFEST).open("a") as file:
                file.write("0" * 64 + "  ../other\n")
            digest = hashlib.sha256((folder / bundle.MANIFEST).read_bytes()).hexdigest()
            (folder / bundle.SUCCESS).write_text(digest)
            (folder.parent / "CHAMPION").write_text(digest[:12])
            folder.rename(folder.with_name(digest[:12]))
        case "unsealed":
            with (folder / bundle.MANIFEST).open("a") as file:
                file.write("0" * 64 + "  other\n")
        case "link":
            (folder / "serving" / "m").mkdir(parents=True)
            (folder / "serving" / "m" / "2").symlink_to(tmp_path)
        case "pipe":
            os.mkfifo(folder / "pipe")
        case "hidden":
            (folder / ".x.tmp").write_text("")
        case "lock":
            (folder / ".x.lock").write_text("")
        case "empty":
            (folder / "serving" / "m" / "3").mkdir(parents=True)
        case "linked":
            (folder / "model.safetensors").rename(tmp_path / "weights")
            (folder / "model.safetensors").symlink_to(tmp_path / "weights")
        case "pointer":
            folder.rename(folder.with_name("0" * 12))
            (folder.parent / "CHAMPION").write_text("0" * 12)
    exports = folder.parent
    assert words in refused("verify", exports)
    assert words in refused("sign", exports, "--key", tmp_path / "key.pem")
    refused("verify", exports, "--key", tmp_path / "key.pub")


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_a_signature_from_elsewhere_is_added_to_its_bundle(where: Store, tmp_path: Path) -> None:
    exports = f"{where.uri}/flowers"
    call("sign", tmp_path / "made", "--key", tmp_path / "key.pem")
    signature = tmp_path / "made" / bundle.SIGNATURE
    done = call("verify", exports, "--key", tmp_path / "key.pub", "--signature", signature)
    assert "signed by the key" in done.output, done.exception
    assert call("sign", exports, "--signature", signature).exception is None
    assert call("verify", exports, "--key", tmp_path / "key.pub").exception is None
    other = exported(where, "flowers", tmp_path / "second", 5, Lineage("run-2"))
    error = refused("sign", f"{exports}/{other}", "--signature", signature)
    assert f"this is not a signature of {exports}/{other}: MANIFEST.sha256 differs" in error
    error = refused("sign", exports, "--signature", tmp_path / "key.pub")
    assert "not a signature in the format of OpenSSF Model Signing" in error


@pytest.mark.parametrize("where", ["folder"], indirect=True)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "EXPORTS", "--key", "key.pem"], "key.pem is not a public key: openssl pkey"),
        (["verify", "EXPORTS", "--key", "none"], "cannot read none: No such file"),
        (["verify", "EXPORTS", "--identity", "ana@x"], "--identity and --issuer require"),
        (["verify", "EXPORTS", "--trust-root", "x"], "--trust-root is for --identity"),
        (["verify", "EXPORTS", "--key", "key.pub", "--issuer", "x"], "exclude each other"),
        (["verify", "EXPORTS", "--signature", "key.pub"], "needs its signer: give --key"),
        (["verify", "."], "there is no bundle at .: give the folder that a run names"),
        (["verify", "none"], "bundle='none' is a folder that does not exist"),
        (["sign", "EXPORTS"], "give --key to sign with, or --signature"),
        (["sign", "EXPORTS", "--key", "key.pub"], "--key key.pub is not a private key"),
    ],
)
def test_invalid_input_fails_with_one_line_error(
    where: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"{where.uri}/flowers" if word == "EXPORTS" else word for word in words]
    assert said in refused(*given)
