"""The pages: their links, code and generated parts."""

import ast
import importlib
import inspect
import itertools
import json
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from kfp.dsl.base_component import BaseComponent

from docs import reference
from kfp_ddp import __version__
from kfp_ddp.cli import COMMANDS, app
from kfp_ddp.components.preflight.component import preflight
from kfp_ddp.jobs.identity import STEP
from kfp_ddp.pipelines.train_resnet import train_resnet
from kfp_ddp.plan.form import SUBJECTS, description
from tests.pages import ROOT, SETTINGS_FILE, commands, fences, of_ours

FOLDERS = ("deploy", "examples", "images", "release", "training")
PAGES = sorted(
    [
        *ROOT.glob("docs/*.md"),
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md")),
        *(ROOT / name / "README.md" for name in FOLDERS),
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
def test_links_lead_to_existing_files_and_headings(page: Path) -> None:
    for match in LINK.findall(page.read_text()):
        target = "".join(match)
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    match = re.findall(r"^#+ (.+)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", item.lower().strip()) for item in match)
    return {item.replace(" ", "-") for item in plain}


RULES = [
    rule
    for file in ROOT.glob("deploy/monitoring/alerts/*rule.yaml")
    for group in yaml.safe_load(file.read_text())["spec"]["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_alerts_link_to_a_heading_of_their_own(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("/blob/main/")[2].partition("#")
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(ROOT / page)


def test_alerts_of_nights_select_steps_by_their_label() -> None:
    text = (ROOT / "deploy" / "monitoring" / "alerts" / "nightlyrule.yaml").read_text()
    label = f"label_{re.sub(r'[^a-z]', '_', STEP)}"
    assert set(re.findall(rf'{label}="([^"]+)"', text)) == {"preflight", "publish"} <= OURS.keys()
    assert STEP in text


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_options_of_commands_exist(page: Path) -> None:
    for words in filter(None, map(of_ours, commands(page))):
        command, rest, name = app, words, "kfp-ddp"
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            name, context = rest[0], click.Context(command)
            match = command.get_command(context, name)
            assert match is not None, words
            command, rest = match, rest[1:]  # type: ignore[assignment]
        known = {
            option: item
            for item in command.get_params(click.Context(command))
            for option in (*item.opts, *item.secondary_opts)
        }
        for word in rest:
            if word.startswith("-") and len(word) > 1 and word != "--version":
                assert word.partition("=")[0] in known, f"{name}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_settings_in_mappings_exist(page: Path) -> None:
    """Each is `job={...}` in the form that Python and JSON share."""
    mappings: list[tuple[str, Iterable[str]]] = []
    for subject, text in MAPPING.findall(page.read_text()):
        written = ast.parse(text, mode="eval").body
        assert isinstance(written, ast.Dict)
        mappings.append((subject, [ast.literal_eval(key) for key in written.keys if key]))
    for _, text in SETTINGS_FILE.findall(page.read_text()):
        for name, value in yaml.safe_load(text).items():
            assert name in ("sweep", *inspect.signature(train_resnet.pipeline_func).parameters)
            mappings += [(name, value)] if name in SUBJECTS else []
    for subject, names in mappings:
        known = {name for model in SUBJECTS[subject] for name in model.model_fields}
        assert set(names) <= known, names


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_applied_files_exist_and_code_is_valid(page: Path) -> None:
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
def test_inputs_and_outputs_of_components_exist(page: Path) -> None:
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
                names = {item.arg for item in node.keywords if item.arg}
                needed = {name for name, item in inputs.items() if not item.optional}
                assert names <= inputs.keys(), f"{component.name}: {names - inputs.keys()}"
                partial = node.args or any(item.arg is None for item in node.keywords)
                assert partial or needed <= names, f"{component.name}: {needed - names}"
            match node:
                case ast.Subscript(
                    value=ast.Attribute(value=ast.Name(id=task), attr="outputs"),
                    slice=ast.Constant(value=str(output)),
                ) if requested := made.get(task):
                    assert output in (requested.component_spec.outputs or {}), f"{task}: {output}"


def of_a_call(node: ast.AST) -> BaseComponent | None:
    """Return the component of ours that a call, or a chain of calls on it, creates."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return OURS.get(node.func.id)
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return None


def test_reference_has_every_command() -> None:
    documented = set(
        re.findall(r"<!-- command: (\S+) -->", (ROOT / "docs" / "reference.md").read_text())
    )
    assert documented == set(COMMANDS)


def test_generated_parts_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_preflight_has_the_form_of_the_pipeline_as_inputs() -> None:
    inputs = preflight.component_spec.inputs
    form = train_resnet.component_spec.inputs
    assert inputs.keys() >= form.keys() - {"bucket_secret"}
    for name in form.keys() - {"bucket_secret"}:
        assert inputs[name].type == form[name].type, name
        assert inputs[name].default == form[name].default or name in (
            "gate",
            "recipe",
            "pretrained",
        )
    for name in inputs.keys() - {"image", "publish", "run_id"}:
        assert inputs[name].description == description(name)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_setting_of_a_mapping_is_in_a_table(subject: str) -> None:
    written = "".join(
        path.read_text() for name in reference.DOCUMENTS for path in reference.ROOT.glob(name)
    )
    for model in SUBJECTS[subject]:
        own = model.set_by_step if subject != "job" else {"kind"}
        for name in set(model.model_fields) - own:
            assert f"| `{name}` | " in written, (model, name)


def test_stale_text_is_listed_and_updated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- inputs: gate -->\nold\n<!-- /inputs -->\nb\n")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "DOCUMENTS", ("README.md",))
    assert reference.main(["--check"]) == 1
    assert "README.md is stale" in capsys.readouterr().out
    assert "old" in readme.read_text()
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    text = readme.read_text()
    assert "\nold\n" not in text
    assert "| `accuracy` | float | required | Accuracy of the model" in text
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")


REPOSITORY = Path(__file__).parents[3]


def test_version_is_defined_once() -> None:
    names = subprocess.run(
        [
            *("git", "grep", "-l", "--fixed-strings", __version__, "--"),
            *(":!*.lock", ":!compiled", ":!tests", ":!CHANGELOG.md"),
            ":!components/*/component.yaml",  # generated
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = {name: (REPOSITORY / name).read_text() for name in names}
    files = [name for name in names if __version__ in reference.IMAGE.sub("", texts[name])]
    assert files == ["kfp_ddp/__init__.py"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "kfp_ddp/__init__.py"


def test_new_version_reaches_all_references_to_images(monkeypatch: pytest.MonkeyPatch) -> None:
    naming = subprocess.run(
        ["git", "grep", "-lE", r"kfp-ddp/(launcher|trainer):[0-9]", "--", ":!compiled"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "components/train/component.py" in naming
    monkeypatch.setattr(reference, "__version__", "9.8.7")
    written = {
        path.relative_to(REPOSITORY).as_posix()
        for path, text in reference._documents()
        if "launcher:9.8.7" in text or "trainer:9.8.7" in text
    }
    assert set(naming) <= written
