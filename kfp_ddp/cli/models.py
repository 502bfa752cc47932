"""`kfp-ddp models`, `promote`, `rollback`, `sign`, `verify` and `gc`: exported models."""

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kfp_ddp.cli.options import AS_JSON, FILE, configured, echo, show, text_option
from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import plural

if TYPE_CHECKING:
    from kfp_ddp.client.models import ModelVersion
    from kfp_ddp.models.signature import Signer


@click.command("models")
@click.argument("name", default="")
@AS_JSON
@configured("destination")
def models(name: str, destination: str, as_json: bool) -> None:
    """List the models at the destination, or the versions of NAME with their data and runs.

    kfp-ddp models flowers --destination gs://bucket/models
    """
    from kfp_ddp.client import models
    from kfp_ddp.models.champion import history, list_versions, read_pointer

    where = models.open_models(destination)
    if name:
        versions = models.Model(where, name).versions()
        changes = [change.model_dump() for change in history(where, name)]
        rows = [asdict(version) for version in versions]
        lines = [*map(_line, versions), *map(_change_line, changes)]
        show(as_json, {"name": name, "versions": rows, "champions": changes}, *lines)
        return
    known = list_versions(where)
    if not known and not as_json:
        echo(f"no models at {where.uri}", err=True)
    facts = {
        model: {"champion": read_pointer(where, model), "versions": names}
        for model, names in known.items()
    }
    lines = [
        f"{model}: champion {fact['champion'] or 'none'}, {plural(len(known[model]), 'version')}"
        for model, fact in facts.items()
    ]
    show(as_json, facts, *lines)


@click.command("promote")
@click.argument("name")
@click.argument("version")
@text_option("--instead-of", metavar="VERSION", help="Only if this version is the champion.")
@AS_JSON
@configured("destination", "model_registry")
def promote(
    name: str, version: str, instead_of: str, destination: str, model_registry: str, as_json: bool
) -> None:
    """Make VERSION the champion of the model NAME, with which the next model is compared.

    The version is verified first. If another one becomes the champion meanwhile, nothing changes.

    kfp-ddp promote flowers 67c0cb93 --destination gs://bucket/models
    """
    from kfp_ddp.client.models import Model, open_models

    model = Model(open_models(destination), name, model_registry)
    _print_change(name, model.promote(version, instead_of), as_json)


@click.command("rollback")
@click.argument("name")
@AS_JSON
@configured("destination", "model_registry")
def rollback(name: str, destination: str, model_registry: str, as_json: bool) -> None:
    """Make the previous champion of the model NAME the champion again.

    The replaced version remains at the destination. A second rollback goes one further back.

    kfp-ddp rollback flowers --destination gs://bucket/models
    """
    from kfp_ddp.client.models import Model, open_models

    model = Model(open_models(destination), name, model_registry)
    _print_change(name, model.rollback(), as_json)


def _print_change(name: str, change: tuple[str, str], as_json: bool) -> None:
    champion, replaced = change
    line = f"{champion} is the champion of {name}; replaced: {replaced or 'none'}"
    if champion == replaced:
        line = f"{champion} is already the champion of {name}"
    show(as_json, {"name": name, "champion": champion, "replaced": replaced}, line)


def _change_line(change: dict[str, Any]) -> str:
    by = f" by {change['by']}" if change["by"] else ""
    replaced = change["replaced"] or "none"
    return f"{change['at'][:16]} {change['version']} replaced {replaced}{by}"


def _line(version: "ModelVersion") -> str:
    mark = "champion" if version.champion else ""
    if version.damaged:
        return f"{version.version}  {mark:8}  ! {version.damaged}"
    facts = {
        "accuracy": f"{version.accuracy:.4f} of {version.samples:,}",
        "": version.architecture,
        "data": version.dataset_digest[:12],
        "run": version.run_id[:8],
        "compared with": version.compared_with,
        "exported": version.exported_at[:16].replace("T", " "),
    }
    texts = (f"{label} {value}".strip() for label, value in facts.items() if value)
    return f"{version.version}  {mark:8}  {', '.join(texts)}"


ADVICE = "do not use it: publish it again"
TIME = "%Y-%m-%dT%H:%M:%SZ"
PASSWORD = "KFP_DDP_SIGN_PASSWORD"  # noqa: S105
KEY = click.option("--key", type=FILE, help="Public key in PEM of the required signer.")


@click.command("sign")
@click.argument("bundle")
@click.option("--key", type=FILE, help=f"Private key in PEM; {PASSWORD} may hold its password.")
@click.option("--signature", type=FILE, help="An existing signature, such as one of model_signing.")
def sign(bundle: str, key: Path | None, signature: Path | None) -> None:
    """Sign BUNDLE.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. All files are first checked against the manifest. For
    Sigstore, sign a downloaded bundle by `model_signing sign sigstore`, and add its signature by
    --signature.

    kfp-ddp sign gs://bucket/models/flowers --key release.pem
    """
    from kfp_ddp.models.bundle import SIGNATURE
    from kfp_ddp.models.champion import open_bundle
    from kfp_ddp.models.signature import check_fits, key_signer, make, private_key

    if (key is None) == (signature is None):
        raise InputError("give --key to sign with, or --signature with an existing signature")
    signer = "an external signer"
    opened = open_bundle(bundle, ADVICE)
    if key is not None:
        secret = private_key(_content(key), os.environ.get(PASSWORD, ""), f"--key {key}")
        content = make(opened, secret)
        signer = key_signer(secret.public_key()).name
    elif signature is not None:
        content = _content(signature)
        check_fits(opened, content)
    opened.verify()
    opened.where.write(opened.folder + SIGNATURE, content)
    echo(f"{opened.uri}: signed by {signer}")


@click.command("verify")
@click.argument("bundle")
@KEY
@text_option("--identity", help="Required signer by Sigstore, such as an e-mail address.")
@text_option("--issuer", help="OpenID Connect issuer of --identity.")
@click.option("--trust-root", type=FILE, help="trusted_root.json of a private Sigstore.")
@click.option(
    "--signature", type=FILE, help="File with the signature.  [default: model.sig of the bundle]"
)
@text_option("--name", help="Required name of the model.")
@click.option(
    "--since", type=click.DateTime(["%Y-%m-%d", TIME]), help="Earliest time of the export, in UTC."
)
@AS_JSON
def verify(
    bundle: str,
    key: Path | None,
    identity: str,
    issuer: str,
    trust_root: Path | None,
    signature: Path | None,
    name: str,
    since: datetime | None,
    as_json: bool,
) -> None:
    """Check all files of BUNDLE against its manifest, and the manifest against a signature.

    BUNDLE is a folder or a URI (gs://, s3://, az://): a bundle, the output of a run, or the folder
    of a model's versions, for its champion. An incomplete bundle, or one without the required
    signature, ends with exit code 2. Signatures have the format of OpenSSF Model Signing. One is
    valid at any place and time: --name refuses a bundle of another model, --since an old one.

    kfp-ddp verify gs://bucket/models/flowers --key release.pub --name flowers --since 2026-11-01
    """
    from kfp_ddp.models.champion import open_bundle
    from kfp_ddp.models.signature import check

    signer = find_signer(key, identity, issuer, trust_root)
    if signature is not None and signer is None:
        raise InputError("--signature needs its signer: give --key, or --identity")
    opened = open_bundle(bundle, ADVICE)
    check(opened, signer, _content(signature) if signature is not None else None)
    count = len(opened.listed or ())
    size = opened.verify()
    exported = str(opened.lineage().get("exported_at") or "")
    if name and opened.model_name != name:
        raise InputError(f"{opened.uri} is of the model {opened.model_name}, not {name}: {ADVICE}")
    if since is not None and exported < since.strftime(TIME):
        at = exported or "at an unknown time"
        raise InputError(f"{opened.uri} was exported {at}, before --since: {ADVICE}")
    by = signer.name if signer is not None else ""
    signed = opened.signature is not None
    if by:
        end = f"signed by {by}"
    elif signed:
        end = "signed, not checked: give --key, or --identity and --issuer"
    else:
        end = "not signed"
    facts = {"uri": opened.uri, "version": opened.version, "files": count, "size": size}
    facts |= {"name": opened.model_name, "exported_at": exported, "signed": signed, "by": by}
    show(as_json, facts, f"{opened.uri}: complete, {count} files, {size / 1e6:.1f} MB", end)


def find_signer(
    key: Path | None, identity: str = "", issuer: str = "", trust: Path | None = None
) -> "Signer | None":
    """Return the required signer or None; raise InputError for a wrong set of options, or key."""
    from kfp_ddp.models.signature import identity_signer, key_signer, public_key

    by_identity = identity or issuer or trust
    if key is not None and by_identity:
        raise InputError("--key and --identity exclude each other: give one of them")
    if key is not None:
        return key_signer(public_key(_content(key), f"--key {key}"))
    if not identity and not issuer:
        if trust is not None:
            raise InputError("--trust-root is for --identity and --issuer: give both")
        return None
    if not identity or not issuer:
        raise InputError("--identity and --issuer require each other: give both")
    return identity_signer(identity, issuer, trust)


def _content(path: Path) -> bytes:
    from kfp_ddp.models.bundle import LARGEST_SIGNATURE

    try:
        with path.open("rb") as file:
            return file.read(LARGEST_SIGNATURE)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; correct its path") from None


LOCAL_BUNDLES = "; or give a folder of this machine as --destination, to delete its old bundles"


@click.command("gc")
@configured("namespace", "context", "destination")
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=3,
    help="Number of copies of each dataset, and of versions of each model, that remain.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and delete nothing.")
@AS_JSON
def gc(
    namespace: str, context: str, destination: str, keep: int, dry_run: bool, as_json: bool
) -> None:
    """Delete copies of datasets and published bundles that nobody uses, the oldest first.

    Copies that a pod mounts or an unfinished run has, champions, the versions that they replaced
    and those in service remain, and so does all that no record of a run names. Without a cluster,
    --destination is a folder of this machine, whose old bundles are deleted.

    kfp-ddp gc --destination ./models --keep 2 --dry-run
    """
    from kfp_ddp.client.models import bundles, copies, open_models
    from kfp_ddp.core.errors import NoClusterError
    from kfp_ddp.k8s.api import Api
    from kfp_ddp.storage.folder import Folder

    where = open_models(destination) if destination else None
    api = None
    try:
        api = Api.connect(namespace, context, otherwise=LOCAL_BUNDLES)
    except NoClusterError:
        if not isinstance(where, Folder):
            raise
    # The rehearsal shows what will go, before anything does.
    rounds = (True,) if dry_run else (True, False)
    for rehearsal in rounds:
        claims = copies(api, keep, dry_run=rehearsal) if api else ()
        lines = [f"claim {name}" for name in claims]
        if where is not None:
            names = bundles(api, where, keep, dry_run=rehearsal)
            lines += [f"bundle {where.uri}/{name}" for name in names]
        word = "unused" if rehearsal else "deleted"
        if rehearsal == dry_run or not as_json:
            show(as_json, {word: lines}, *(f"{word}: {line}" for line in lines or ["nothing"]))
