"""The head of components/*/README.md, in the form of kubeflow/pipelines-components.

Its check wants what its generator writes, to the byte: sections made of the docstring,
metadata.yaml, OWNERS and the example. What is below the marker is ours.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

MARKER = "<!-- custom-content -->"
WIDTH = 120
CAPITALS = frozenset({"API", "CD", "CI", "ID", "KFP", "UI", "URL"})
"""Words that are written in capitals."""


def head(folder: Path) -> str:
    """Return what is above the marker in the README of a component."""
    function = function_of(folder)
    about = docstring_parser.parse(ast.get_docstring(function) or "")
    facts = yaml.safe_load((folder / "metadata.yaml").read_text())
    facts["owners"] = yaml.safe_load((folder / "OWNERS").read_text())
    example = folder / "example_pipelines.py"
    sections = [f"# {title(facts['name'])} ✨"]
    if facts["stability"] != "stable":
        note = "This asset is not yet stable and may change."
        sections.append(f"> ⚠️ **Stability: {facts['stability']}** — {note}")
    sections += ["## Overview 🧾", *overview(about)]
    sections += ["## Inputs 📥", "\n".join(parameters(function, about))]
    sections += ["## Outputs 📤", "\n".join(returned(function, about))]
    if example.exists():
        sections += ["## Usage Examples 🧪", f"```python\n{example.read_text()}\n```"]
    sections += ["## Metadata 🗂️", "\n".join(metadata(facts))]
    lines = "\n\n".join(sections).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n\n\n"


def function_of(folder: Path) -> ast.FunctionDef:
    """Return the function of a component, which is not imported."""
    tree = ast.parse((folder / "component.py").read_text())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return function


def title(name: str) -> str:
    """Return the title of a name."""
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return " ".join(capitalized(word) for word in re.split(r"[ _-]+", spaced))


def capitalized(word: str) -> str:
    """Return a word as in a title."""
    return word.upper() if word.upper() in CAPITALS else word.capitalize()


def overview(about: docstring_parser.Docstring) -> Iterator[str]:
    """Yield the paragraphs of a docstring above its sections."""
    text = f"{about.short_description}\n\n{about.long_description or ''}"
    for paragraph in text.strip().split("\n\n"):
        one = " ".join(paragraph.split())
        yield textwrap.fill(one, WIDTH, break_long_words=False, break_on_hyphens=False)


def parameters(function: ast.FunctionDef, about: docstring_parser.Docstring) -> Iterator[str]:
    """Yield the lines of the table of parameters, which has the artifacts that are written, too."""
    described = {one.arg_name: one.description for one in about.params}
    names = function.args.args
    required = len(names) - len(function.args.defaults)
    defaults: list[ast.expr | None] = [None] * required
    defaults += function.args.defaults
    yield "| Parameter | Type | Default | Description |"
    yield "|-----------|------|---------|-------------|"
    for name, default in zip(names, defaults, strict=True):
        kind = ast.unparse(name.annotation) if name.annotation else "Any"
        text = described.get(name.arg, "")
        yield f"| `{name.arg}` | `{kind}` | `{shown(default)}` | {text} |"


def shown(default: ast.expr | None) -> str:
    """Return a default as text; None for a parameter without one."""
    if isinstance(default, ast.Constant):
        return '""' if default.value == "" else str(default.value)
    return ast.unparse(default) if default else "None"


def returned(function: ast.FunctionDef, about: docstring_parser.Docstring) -> Iterator[str]:
    """Yield the lines of the table of what is returned."""
    assert function.returns
    text = about.returns.description if about.returns else ""
    yield "| Name | Type | Description |"
    yield "|------|------|-------------|"
    yield f"| Output | `{ast.unparse(function.returns)}` | {text} |"


def metadata(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the list of facts."""
    for name, value in facts.items():
        yield from fact(f"- **{title(name)}**", value, "  ")


def fact(start: str, value: Any, indent: str) -> Iterator[str]:
    """Yield the lines of a fact; those of a list or of a mapping are below its first."""
    nested = isinstance(value, list | dict) and value
    yield f"{start}:" if nested else f"{start}: {value or None}"
    if isinstance(value, dict):
        for name, below in value.items():
            yield from fact(f"{indent}- {title(name)}", below, f"{indent}  ")
    elif nested:
        yield from (f"{indent}- {one_line(item)}" for item in value)


def one_line(item: Any) -> str:
    """Return an item of a list."""
    if isinstance(item, dict):
        return ", ".join(f"{title(name)}: {value}" for name, value in item.items())
    return str(item)
