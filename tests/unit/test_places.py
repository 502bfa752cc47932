"""The places that CONTRIBUTING.md names for a kind of job and for a kind of store."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from kfp_ddp.jobs.fields import KindName
from kfp_ddp.jobs.kinds import KINDS as JOBS
from kfp_ddp.k8s.resource import Resource
from kfp_ddp.storage.kinds import KINDS as STORES
from kfp_ddp.storage.kinds import StoreKind

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LAUNCH = {"create", "get", "list", "watch", "patch", "delete"}
VERBS = {
    ("rbac/role.yaml", "kfp-ddp-launcher"): LAUNCH,
    ("rbac/divided/role.yaml", "kfp-ddp-steps"): {"list"},
    ("multi-team/roles.yaml", "kfp-ddp-look"): {"get", "list", "watch"},
    ("multi-team/roles.yaml", "kfp-ddp-run"): {"delete"},
    ("multi-team/roles.yaml", "kfp-ddp-pods"): {"create", "delete"},
}
"""What each role of deploy/ grants on every kind of job."""
BASE = {"google", "google_crc32c"}
"""What stores import of the packages that are always installed."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def granted(file: str, role: str, resource: Resource) -> set[str]:
    """Return the verbs that a role of deploy/ grants on all objects of a resource."""
    (found,) = (one for one in documents(file) if one["metadata"]["name"] == role)
    verbs: set[str] = set()
    for rule in found["rules"]:
        is_for_it = resource.group in rule["apiGroups"] and resource.plural in rule["resources"]
        if is_for_it and "resourceNames" not in rule:
            verbs |= {*rule["verbs"]}
    return verbs


def test_each_name_of_a_kind_of_job_has_its_class() -> None:
    assert [*JOBS] == [*get_args(KindName)]
    for name, kind in JOBS.items():
        assert type(kind).__module__.startswith("kfp_ddp.jobs.kinds.")
        assert kind.name == name


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("file", "role"), VERBS)
def test_each_kind_of_job_is_in_the_roles(name: str, file: str, role: str) -> None:
    assert granted(file, role, JOBS[name].resource) == VERBS[file, role]


@pytest.mark.parametrize("name", JOBS)
def test_port_of_each_kind_of_job_is_in_the_policy(name: str) -> None:
    (policy,) = documents("network/jobs.yaml")
    port = JOBS[name].rendezvous_port
    for direction in ("ingress", "egress"):
        ranges = [
            range(one["port"], one.get("endPort", one["port"]) + 1)
            for rule in policy["spec"][direction]
            for one in rule["ports"]
        ]
        assert not port or any(port in numbers for numbers in ranges)


@pytest.mark.parametrize("name", JOBS)
def test_each_kind_of_job_is_described(name: str) -> None:
    text = (ROOT / "components" / "job" / "README.md").read_text().lower()
    assert name in text


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.scheme)
def test_each_kind_of_store_has_its_module_and_extra(kind: StoreKind) -> None:
    """A missing package is named by the extra of the module's name."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert kind.source
    for place in filter(None, (kind.store, kind.source)):
        name, _, attribute = place.partition(".")
        module = importlib.import_module(f"kfp_ddp.storage.{name}")
        assert callable(getattr(module, attribute))
        assert not foreign(Path(str(module.__file__))) or name in extras["optional-dependencies"]


def foreign(path: Path) -> set[str]:
    """Return the packages that a module imports, in functions too, and that may be missing."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    names = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - BASE - {"kfp_ddp"}


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.scheme)
def test_each_kind_of_store_is_in_the_table_of_what_is_checked(kind: StoreKind) -> None:
    """Plain http is checked as https is, and computed images are not downloaded."""
    text = (ROOT / "kfp_ddp" / "storage" / "README.md").read_text()
    table = text.partition("## What is checked")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`\w+://`|a folder) \|", table, re.M)
    row = {"file": "a folder", "http": "`https://`"}.get(kind.scheme, f"`{kind.scheme}://`")
    assert row in rows or kind.scheme == "synthetic"
