"""Commands on models: `models`, `promote`, `rollback`, `sign` and `verify`."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from cryptography.hazmat.primitives.asymmetric import ec

from kfp_ddp.client import models
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.export.publish import Lineage
from kfp_ddp.models import bundle
from kfp_ddp.models.champion import move, read_pointer
from kfp_ddp.storage.store import Store
from tests import commands
from tests.commands import call, output, refused
from tests.exports import exported
from tests.registry_server.server import RegistryServer, status
from tests.unit.models.test_signature import pem, public

KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


@pytest.fixture
def line(where: Store, tmp_path: Path) -> list[str]:
    """Three versions of flowers, each of which took the place of the one before."""
    made = [""]
    for number in range(3):
        lineage = Lineage(f"run-{number}", f"{where.uri}/flowers", made[-1])
        made.append(exported(where, "flowers", tmp_path / str(number), 9 - number, lineage))
        move(where, "flowers", made[-1], made[-2], f"run-{number}")
    return made[1:]


def called(where: Store, *words: str) -> Result:
    return call(*words, "--destination", where.uri)


def document(where: Store, *words: str) -> Any:
    return commands.document(*words, "--destination", where.uri)


def unchanged(where: Store, *words: str) -> str:
    """Return the error of a command that does not change the champion."""
    before = read_pointer(where, "flowers")
    error = refused(*words, "--destination", where.uri)
    assert read_pointer(where, "flowers") == before
    return error


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_old_bundles_of_a_folder_are_deleted_without_a_cluster(
    where: Store, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(kubeconfig, str(tmp_path / "none"))
    for number in (3, 4):
        exported(where, "flowers", tmp_path / str(number), 9 - number, Lineage(f"run-{number}"))
    unused = document(where, "gc", "--keep", "1", "--dry-run")["unused"]
    assert len(unused) >= 2  # all were exported in the same second
    assert len(document(where, "models")["flowers"]["versions"]) == 5
    assert document(where, "gc", "--keep", "1") == {"deleted": unused}
    left = document(where, "models")["flowers"]["versions"]
    assert {*line[1:]} <= {*left}  # the champion, and the one before
    assert len(left) == 5 - len(unused)
    assert "--destination" in refused("gc")
    for words in (["gc"], ["gc", "--destination", "gs://bucket/models"], ["schedule", "list"]):
        error = refused(*words)
        assert "KUBECONFIG" in error
        assert "backend=local" not in error


def test_versions_are_listed_with_lineage(where: Store, line: list[str], tmp_path: Path) -> None:
    other = exported(where, "birds", tmp_path / "birds", 3, Lineage())
    assert document(where, "models") == {
        "birds": {"champion": "", "versions": [other]},
        "flowers": {"champion": line[2], "versions": sorted(line)},
    }
    assert f"flowers: champion {line[2]}, 3 versions" in called(where, "models").output
    models_document = document(where, "models", "flowers")
    version = next(one for one in models_document["versions"] if one["version"] == line[1])
    assert version.pop("exported_at")
    assert version == {
        "version": line[1],
        "uri": f"{where.uri}/flowers/{line[1]}",
        "champion": False,
        "damaged": "",
        "accuracy": 52 / 60,
        "samples": 60,
        "architecture": "resnet18",
        "run_id": "run-1",
        "dataset_digest": "d" * 64,
        "compared_with": line[0],
        "settings": {"epochs": 8},
    }
    assert [one["version"] for one in models_document["champions"]] == line
    shown = called(where, "models", "flowers").output
    assert f"{line[2]}  champion  accuracy 0.8833 of 60, resnet18, data dddddddddddd" in shown
    assert f"{line[2]} replaced {line[1]} by run-2" in shown


def test_rollback_goes_back_step_by_step_and_promote_forward(where: Store, line: list[str]) -> None:
    first, second, third = line
    assert document(where, "rollback", "flowers") == {
        "name": "flowers", "champion": second, "replaced": third
    }  # fmt: skip
    assert document(where, "rollback", "flowers")["champion"] == first
    assert f"{first} is the first known champion" in unchanged(where, "rollback", "flowers")
    assert document(where, "promote", "flowers", third[:6])["replaced"] == first
    assert document(where, "rollback", "flowers")["champion"] == first
    document(where, "promote", "flowers", third)
    for name, _ in list(where.list("flowers/CHAMPIONS")):
        where.delete(name)  # without a history, the bundle's lineage has the previous champion
    assert document(where, "rollback", "flowers")["champion"] == second


def test_an_invalid_version_is_no_champion(where: Store, line: list[str], tmp_path: Path) -> None:
    for path in (tmp_path / "0").iterdir():
        where.put(path, f"flowers/{'f' * 12}/{path.name}")
    message = unchanged(where, "promote", "flowers", "fff")
    assert "is that of" in message
    where.write(f"flowers/{line[0]}/model.safetensors", b"torn")
    assert "model.safetensors is not what" in unchanged(where, "promote", "flowers", line[0])
    where.update(f"flowers/{line[1]}/metrics.json", lambda _: b"{}")
    assert "metrics.json is not what MANIFEST" in unchanged(where, "rollback", "flowers")
    assert "cannot be the champion" in unchanged(where, "promote", "flowers", line[1])
    assert "! the champion" in called(where, "models", "flowers").output
    where.delete(f"flowers/{line[1]}/_SUCCESS")
    message = unchanged(where, "rollback", "flowers")
    assert f"the champion of flowers before {line[2]}, was deleted from {where.uri}" in message
    assert line[0] in message


def test_unknown_names_are_errors_of_one_line(where: Store, line: list[str]) -> None:
    assert "did you mean 'flowers'" in unchanged(where, "models", "flower")
    assert "did you mean 'flowers'" in unchanged(where, "promote", "flowrs", line[0])
    assert "'zz' matches no version of flowers" in unchanged(where, "promote", "flowers", "zz")
    message = unchanged(where, "promote", "flowers", line[0], "--instead-of", line[1])
    assert f"the champion of flowers is {line[2]}, not {line[1]}" in message
    assert "already" in called(where, "promote", "flowers", line[2]).output


def test_changed_champion(where: Store, line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    described = models.describe

    def while_it_is_verified(*given: Any) -> models.ModelVersion:
        where.update("flowers/CHAMPION", lambda _: f"{line[1]}\n".encode())
        return described(*given)

    monkeypatch.setattr(models, "describe", while_it_is_verified)
    done = called(where, "promote", "flowers", line[0])
    assert isinstance(done.exception, StorageError)
    assert f"was set to {line[1]} meanwhile" in str(done.exception)
    assert read_pointer(where, "flowers") == line[1]


def test_a_destination_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no destination is set: give --destination" in refused("models")
    missing = call("models", "--destination", tmp_path / "no")
    assert "not found: correct" in str(missing.exception)
    assert output("models", "--destination", tmp_path) == ""


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_a_token_of_the_registry_needs_https(where: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.registry_at("http://registry.example", where) is not None
    monkeypatch.setenv(models.REGISTRY_TOKEN, "secret")
    for address in ("https://registry.example", "http://127.0.0.1:8080"):
        assert models.registry_at(address, where) is not None
    with pytest.raises(InputError, match=r"is not sent to http://registry\.example without https"):
        models.registry_at("http://registry.example", where)
    monkeypatch.setattr("kfp_ddp.client.kfp.login.NAMESPACE_FILE", Path(__file__))  # in a pod
    assert models.registry_at("http://model-registry-service.kubeflow.svc:8080", where) is not None


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_registry_follows(where: Store, line: list[str], registry_server: RegistryServer) -> None:
    def stages() -> dict[str, str]:
        versions = registry_server.store.versions
        return {one["name"]: one["customProperties"]["stage"]["string_value"] for one in versions}

    for words in (["promote", "flowers", line[0]], ["rollback", "flowers"]):
        document(where, *words, "--model-registry", registry_server.url)
    assert stages() == {line[0]: "former", line[2]: "champion"}
    registry_server.fail("update_model_version", status(500))
    done = called(where, "rollback", "flowers", "--model-registry", registry_server.url)
    assert isinstance(done.exception, StorageError)
    registry_server.heal()
    assert read_pointer(where, "flowers") == line[1]
    done = called(where, "promote", "flowers", line[1], "--model-registry", registry_server.url)
    assert "already" in done.output
    assert stages() == {line[0]: "former", line[1]: "champion", line[2]: "former"}


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_mlflow_follows(
    where: Store, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")
    monkeypatch.setenv(models.REGISTRY_TOKEN, "of another registry")
    for words, champion in (
        (["promote", "flowers", line[0]], line[0]),
        (["rollback", "flowers"], line[2]),
    ):
        document(where, *words, "--model-registry", "mlflow")
        named = MlflowClient().get_model_version_by_alias("flowers", "champion")
        assert (named.tags["version"], named.tags["stage"]) == (champion, "champion")
    versions = MlflowClient().search_model_versions("name = 'flowers'")
    stages = {one.tags["version"]: one.tags["stage"] for one in versions}
    assert stages == {line[0]: "former", line[2]: "champion"}


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_registry_is_down(where: Store, line: list[str], registry_server: RegistryServer) -> None:
    registry_server.fail("*", status(503))
    for words in (["promote", "flowers", line[0]], ["rollback", "flowers"]):
        done = called(where, *words, "--model-registry", registry_server.url)
        assert isinstance(done.exception, StorageError), done.output
        assert read_pointer(where, "flowers") == line[2]
    assert "model_registry" not in unchanged(where, "promote", "flowers", "zz")
    message = unchanged(where, "promote", "flowers", line[0], "--model-registry", "localhost:8080")
    assert "it should be an address such as http://model-registry-service" in message


@pytest.fixture
def signable(where: Store, tmp_path: Path) -> Store:
    """A destination with the model flowers, which has a champion."""
    version = exported(where, "flowers", tmp_path / "made", 3, Lineage("run-1"))
    move(where, "flowers", version, "", "run-1")
    for name, key in (("key", KEY), ("other", OTHER)):
        (tmp_path / f"{name}.pem").write_bytes(pem(key))
        (tmp_path / f"{name}.pub").write_bytes(public(key))
    return where


def test_a_published_bundle_is_signed_and_verified(signable: Store, tmp_path: Path) -> None:
    exports = f"{signable.uri}/flowers"
    version = bundle.version(tmp_path / "made")
    count = len(bundle.files(tmp_path / "made")) - 2
    complete = f"{exports}/{version}: complete, {count} files, 0.0 MB\n"
    assert output("verify", exports) == f"{complete}not signed\n"
    assert "is not signed: it has no" in refused("verify", exports, "--key", tmp_path / "key.pub")
    signed = output("sign", exports, "--key", tmp_path / "key.pem")
    assert f"{exports}/{version}: signed by the key " in signed
    facts = commands.document("verify", exports, "--key", tmp_path / "key.pub")
    assert (facts["version"], facts["files"], facts["signed"]) == (version, count, True)
    at = facts["exported_at"]
    output("verify", exports, "--name", facts["name"], "--since", at)
    assert "not cats" in refused("verify", exports, "--name", "cats")
    assert f"was exported {at}" in refused("verify", exports, "--since", "2999-01-01")
    assert facts["by"] in signed
    assert "signed, not checked" in output("verify", f"{exports}/{version}")
    assert "was made by another key" in refused("verify", exports, "--key", tmp_path / "other.pub")


@pytest.mark.parametrize("where", ["folder"], indirect=True)
def test_the_folder_of_a_run_is_accepted(signable: Store, tmp_path: Path) -> None:
    (tmp_path / "made").rename(tmp_path / "exports" / "bundle")
    signed = output("sign", signable.uri, "--key", tmp_path / "key.pem")
    assert signed.startswith(f"{signable.uri}/bundle: signed by the key ")
    verified = output("verify", signable.uri, "--key", tmp_path / "key.pub")
    assert verified.startswith(f"{signable.uri}/bundle: complete, ")


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
        (".x.tmp", "is damaged: .x.tmp is not in MANIFEST.sha256"),
        (".x.lock", "is damaged: .x.lock is not in MANIFEST.sha256"),
        ("empty", "is damaged: serving/m/3/ is not in MANIFEST.sha256"),
        ("linked", "cannot read"),
    ],
)
def test_a_changed_file_is_found(signable: Store, tmp_path: Path, change: str, words: str) -> None:
    folder = tmp_path / "exports" / "flowers" / bundle.version(tmp_path / "made")
    call("sign", folder, "--key", tmp_path / "key.pem")
    match change:
        case "changed":
            (folder / "model.safetensors").write_bytes(bytes(99) + b"1")
        case "gone":
            (folder / "model.safetensors").unlink()
        case "more" | ".x.tmp" | ".x.lock":
            (folder / change).write_text("")
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
def test_a_signature_from_elsewhere_is_added_to_its_bundle(signable: Store, tmp_path: Path) -> None:
    exports = f"{signable.uri}/flowers"
    call("sign", tmp_path / "made", "--key", tmp_path / "key.pem")
    signature = tmp_path / "made" / bundle.SIGNATURE
    own = ("--key", tmp_path / "key.pub")
    assert "signed by the key" in output("verify", exports, *own, "--signature", signature)
    output("sign", exports, "--signature", signature)
    output("verify", exports, *own)
    other = exported(signable, "flowers", tmp_path / "second", 5, Lineage("run-2"))
    error = refused("sign", f"{exports}/{other}", "--signature", signature)
    assert f"this is not a signature of {exports}/{other}: MANIFEST.sha256 differs" in error
    error = refused("sign", exports, "--signature", tmp_path / "key.pub")
    assert "not a signature in the format of OpenSSF Model Signing" in error


@pytest.mark.parametrize("where", ["folder"], indirect=True)
@pytest.mark.parametrize(
    ("words", "message"),
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
    signable: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"{signable.uri}/flowers" if word == "EXPORTS" else word for word in words]
    assert message in refused(*given)
