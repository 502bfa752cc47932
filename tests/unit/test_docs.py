"""What the pages say exists: links, commands and their options, settings, files, code."""

import ast
import importlib
import inspect
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
import yaml
from kfp.dsl.base_component import BaseComponent

from kfp_ddp.checks.form import SUBJECTS
from kfp_ddp.cli import COMMANDS, app
from kfp_ddp.pipelines.train_resnet import train_resnet
from tests.pages import ROOT, SETTINGS_FILE, commands, fences, of_ours

PAGES = sorted(
    [
        *ROOT.glob("docs/*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")),
        *(ROOT / f"{name}/README.md" for name in ("deploy", "examples", "images", "training")),
        *ROOT.glob("components/**/README.md"),
    ]
)
OURS: dict[str, BaseComponent] = {
    path.parent.name: getattr(
        importlib.import_module(f"kfp_ddp.components.{path.parent.name}.component"),
        path.parent.name,
    )
    for path in ROOT.glob("components/*/component.py")
}
LINK = re.compile(r"\]\(([^()\s]+(?:\([^()]*\))?)\)|srcset=\"([^\"]+)\"|src=\"([^\"]+)\"")
MAPPING = re.compile(r"\b(training|job|sync|gate|release)=(\{[^`\n]*\})(?=[`, )]|$)")


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    for found in LINK.findall(page.read_text()):
        target = "".join(found)
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    """The names of the headings, as the sites of repositories make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", each.lower().strip()) for each in found)
    return {each.replace(" ", "-") for each in plain}


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_has_the_options_that_pages_give_it(page: Path) -> None:
    for words in filter(None, map(of_ours, commands(page))):
        command, rest, name = app, words, "kfp-ddp"
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            name, context = rest[0], click.Context(command)
            found = command.get_command(context, name)
            assert found is not None, words
            command, rest = found, rest[1:]  # type: ignore[assignment]
        known = {
            option: each
            for each in command.get_params(click.Context(command))
            for option in (*each.opts, *each.secondary_opts)
        }
        for word in rest:
            if word.startswith("-") and len(word) > 1 and word != "--version":
                assert word.partition("=")[0] in known, f"{name}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_settings_in_mappings_are_those_of_their_subject(page: Path) -> None:
    """Each is `job={...}` in the form that Python and JSON share."""
    given: list[tuple[str, Iterable[str]]] = []
    for subject, text in MAPPING.findall(page.read_text()):
        written = ast.parse(text, mode="eval").body
        assert isinstance(written, ast.Dict)
        given.append((subject, [ast.literal_eval(key) for key in written.keys if key]))
    for _, text in SETTINGS_FILE.findall(page.read_text()):
        for name, value in yaml.safe_load(text).items():
            assert name in ("sweep", *inspect.signature(train_resnet.pipeline_func).parameters)
            given += [(name, value)] if name in SUBJECTS else []
    for subject, names in given:
        known = {name for model in SUBJECTS[subject] for name in model.model_fields}
        assert set(names) <= known, names


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_are_applied_and_shown_are_there_and_code_can_be_read(page: Path) -> None:
    for words in commands(page):
        for flag, file in itertools.pairwise(words):
            if words[0] == "kubectl" and flag in ("-f", "-k") and file.startswith("deploy/"):
                assert (ROOT / file).exists(), words
    for text in fences(page, "python"):
        ast.parse(text)
    for text in fences(page, "json"):
        json.loads(text)
    for text in fences(page, "yaml"):
        assert yaml.safe_load(text), text


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_components_are_called_by_their_inputs_and_asked_for_their_outputs(page: Path) -> None:
    """`...` as an argument stands for the required ones that are left out."""
    for text in fences(page, "python"):
        nodes = list(ast.walk(ast.parse(text)))
        made = {
            target.id: of_a_call(node.value)
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in nodes:
            component = of_a_call(node)
            if component and isinstance(node, ast.Call):
                inputs = component.component_spec.inputs or {}
                given = {each.arg for each in node.keywords if each.arg}
                needed = {name for name, each in inputs.items() if not each.optional}
                assert given <= inputs.keys(), f"{component.name}: {given - inputs.keys()}"
                partial = node.args or any(each.arg is None for each in node.keywords)
                assert partial or needed <= given, f"{component.name}: {needed - given}"
            match node:
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=task), attr="outputs"),
                    slice=ast.Constant(value=str(output)),
                ) if asked := made.get(task):
                    assert output in (asked.component_spec.outputs or {}), f"{task}: {output}"


def of_a_call(node: ast.AST) -> BaseComponent | None:
    """The component of ours that is called there, settings of its task behind it or not."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return OURS.get(node.func.id)
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return None


def test_the_reference_has_every_command() -> None:
    told = set(re.findall(r"<!-- command: (\S+) -->", (ROOT / "docs" / "reference.md").read_text()))
    assert told == set(COMMANDS)


def test_a_wrong_option_link_or_setting_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    checks = {
        "```console\n$ kfp-ddp sync --mirrored a b\n```\n": (
            test_every_command_has_the_options_that_pages_give_it
        ),
        "[a](missing.md)": test_links_lead_to_files_and_headings_that_are_there,
        "# A\n[a](#b)": test_links_lead_to_files_and_headings_that_are_there,
        '`job={"memori": "1Gi"}`': test_settings_in_mappings_are_those_of_their_subject,
        "```console\n$ kubectl apply -f deploy/none.yaml\n```\n": (
            test_files_that_are_applied_and_shown_are_there_and_code_can_be_read
        ),
        "```python\nregister(..., model='x')\n```\n": (
            test_components_are_called_by_their_inputs_and_asked_for_their_outputs
        ),
        "```python\nregister(model_name='x')\n```\n": (
            test_components_are_called_by_their_inputs_and_asked_for_their_outputs
        ),
        "```python\nsynced = data_sync(source='x')\nsynced.outputs['version']\n```\n": (
            test_components_are_called_by_their_inputs_and_asked_for_their_outputs
        ),
    }
    for text, check in checks.items():
        page.write_text(text)
        with pytest.raises(AssertionError):
            check(page)
