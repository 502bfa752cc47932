"""`python -m kfp_ddp.reference [--check]`: what stands in a second place is written from its first.

The signature of `preflight` is made from the form of the pipeline, and the tables in READMEs are
made from the models of settings and the signatures of components: text between

    <!-- settings: training.config.TrainConfig -->   and   <!-- /settings -->
    <!-- inputs: train -->                           and   <!-- /inputs -->
    <!-- command: schedule -->                       and   <!-- /command -->
    <!-- once: config.Config -->                     and   <!-- /once -->
    <!-- graph: train_resnet -->                     and   <!-- /graph -->

The names of torchvision's classifiers are in a file of their own, so that no torch is needed.
Our images are tagged with the version of the package wherever they are named.
"""

import ast
import dataclasses
import importlib
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kfp_ddp import __version__
from kfp_ddp.checks.preflight.parameters import choices, description
from kfp_ddp.core.settings import Settings

ROOT = Path(__file__).parents[1]
FORM = ROOT / "pipelines" / "train_resnet.py"
PREFLIGHT = ROOT / "components" / "preflight" / "component.py"
NAMES = ROOT / "training" / "torchvision_names.py"
DOCUMENTS = ("README.md", "docs/*.md", "training/README.md", "components/*/README.md")
NAMING_IMAGES = (
    *("components/*/component.py", "deploy/**/*.yaml", "images/README.md", "images/*/Dockerfile"),
    *(".ci/run", "benchmarks/*.py", "tests/**/*.py"),
)
NOT_CHECKED = ("bucket_secret",)
IMAGE = re.compile(r"((?:(?:kfp-ddp|\$REGISTRY)/(?:launcher|server|trainer)|\$image):)\d[\w.+-]*\w")
BLOCK = re.compile(
    r"(<!-- (settings|inputs|command|once|graph): (\S+) -->\n).*?(<!-- /\2 -->)", re.S
)
TYPES = {"String": "str", "Integer": "int", "Float": "float", "Boolean": "bool"}


def main(arguments: list[str]) -> int:
    """Write what is not as it should be, or with --check only name it; 1 if there was any."""
    check, stale = "--check" in arguments, False
    for path, text in _documents():
        if path.read_text() != text:
            stale = True
            print(path.relative_to(ROOT), "is stale" if check else "is written anew")
            if not check:
                path.write_text(text)
    if check and stale:
        print("run `make reference` and commit the result")
    return int(check and stale)


def _documents() -> Iterator[tuple[Path, str]]:
    """Each file that is made in part, and what it should be; a component before its table."""
    yield NAMES, torchvision_names()
    found = {path for pattern in (*DOCUMENTS, *NAMING_IMAGES) for path in ROOT.glob(pattern)}
    for path in sorted(found, key=lambda path: (path.suffix == ".md", path)):
        text = path.read_text()
        if path == PREFLIGHT:
            text = preflight(FORM.read_text(), text)
        if path.suffix == ".md":
            text = BLOCK.sub(_block, text)
        yield path, IMAGE.sub(rf"\g<1>{__version__}", text)


def torchvision_names() -> str:
    """The file of them, with its first lines as they are."""
    from torchvision import models

    lines = [f'    "{name}",\n' for name in models.list_models(module=models)]
    head, start, _ = NAMES.read_text().partition("= (\n")
    return head + start + "".join(lines) + ")\n"


def preflight(pipeline: str, component: str) -> str:
    """The component's file with the form of the pipeline as its inputs."""
    module = ast.parse(pipeline)
    form = next(n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == FORM.stem)
    inputs, texts = [], []
    without = len(form.args.args) - len(form.args.defaults)
    defaults = [None] * without + [*form.args.defaults]
    for each, default in zip(form.args.args, defaults, strict=True):
        if each.arg in NOT_CHECKED:
            continue
        line = f"    {ast.get_source_segment(pipeline, each)}"
        if isinstance(default, ast.Dict):
            line += " = {},  # noqa: B006"
        else:
            line += f" = {ast.get_source_segment(pipeline, default)}," if default else ","
        inputs.append(line)
        texts.append(_wrapped(f"{each.arg}: {description(each.arg)}"))
    component = _between(component, "    # The form of the pipeline.\n", inputs, "    image: str")
    return _between(
        component, "        plan_summary: What will run, and warnings.\n", texts, "        image:"
    )


def _between(text: str, start: str, lines: list[str], end: str) -> str:
    """The text with these lines between `start` and `end`."""
    head, start, rest = text.partition(start)
    return head + start + "".join(f"{line}\n" for line in lines) + rest[rest.index(end) :]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12)


def _block(found: re.Match[str]) -> str:
    lines = TABLES[found[2]](found[3])
    return found[1] + "\n".join(lines) + "\n" + found[4]


def settings_table(path: str) -> list[str]:
    """The fields of a model, with what they may be and mean."""
    model: type[Settings] = _named(path)
    lines = ["| Setting | Is | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in model.own:
            kind = ", ".join(f"`{one}`" for one in model.choices(name) if one) or _range(field)
            default = "required"
            if not field.is_required():
                default = _value(field.get_default(call_default_factory=True))
            lines.append(f"| `{name}` | {kind} | {default} | {_cell(field.description)} |")
    return lines


def inputs_table(name: str) -> list[str]:
    """The inputs of a component, or the boxes of a pipeline's form: a name with a dot in it."""
    path = name if "." in name else f"components.{name}.component.{name}"
    inputs = _named(path).component_spec.inputs
    lines = ["| Input | Type | Default | What |", "|---|---|---|---|"]
    for one, given in inputs.items():
        if given.type == "TaskConfig":
            continue  # KFP fills it in
        kind = given.type.removeprefix("system.").partition("@")[0]
        default = _value(given.default) if given.optional else "required"
        text = _cell(given.description)
        closed = ", ".join(f"`{choice}`" for choice in choices(one))
        kind = closed or TYPES.get(kind, kind.lower())
        lines.append(f"| `{one}` | {kind} | {default} | {text} |")
    return lines


def once_table(path: str) -> list[str]:
    """What is set once: the fields of a dataclass, with the variables that set them."""
    from kfp_ddp.core.config import PREFIX

    lines = ["| Setting | In the environment | Default | Meaning |"]
    lines.append("|---|---|---|---|")
    for field in dataclasses.fields(_named(path)):
        variables = [PREFIX + field.name.upper(), field.metadata.get("variable")]
        told = ", ".join(f"`{each}`" for each in variables if each)
        text = _cell(field.metadata["description"])
        lines.append(f"| `{field.name}` | {told} | {_value(field.default)} | {text} |")
    return lines


def command_tables(name: str) -> list[str]:
    """The options of a command, or of each one of a group."""
    import click

    from kfp_ddp.cli import app
    from kfp_ddp.core.config import FIELDS

    group = app.get_command(click.Context(app), name)
    assert group is not None
    within = group.commands if isinstance(group, click.Group) else {"": group}
    lines = [] if within == {"": group} else ["", _cell(group.help)]
    for sub, command in within.items():
        title = f"kfp-ddp {name} {sub}".rstrip()
        context = click.Context(command, info_name=title, terminal_width=1000)
        lines += ["", f"`{command.get_usage(context).partition(' ')[2]}`", ""]
        lines += [_cell((command.help or "").partition("\n\n")[0]), ""]
        options = [each for each in command.params if isinstance(each, click.Option)]
        options = [each for each in options if not each.hidden]
        once = [each.opts[0] for each in options if each.name in FIELDS]
        options = [each for each in options if each.name not in FIELDS]
        lines += ["| Option | Default | What |", "|---|---|---|"] if options else []
        for option in options:
            names = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
            shown = option.default if isinstance(option.default, str | int | float) else ""
            default = "" if option.is_flag and not option.default else _value(shown)
            text = _cell(option.help) + _of(option.type)
            lines.append(f"| {names} | {default} | {text} |")
        if once:
            lines += ["", f"Also {', '.join(f'`{each}`' for each in once)}: [set once](#set-once)."]
    return lines


def _of(kind: object) -> str:
    """What an option may be, where that is a choice."""
    choices = ", ".join(f"`{each}`" for each in getattr(kind, "choices", ()) if each)
    return f" One of {choices}." if choices else ""


def graph_block(name: str) -> list[str]:
    """Return the Mermaid flowchart of a committed pipeline."""
    from kfp_ddp.pipelines.graph import mermaid

    return ["```mermaid", *mermaid(ROOT / "compiled" / f"{name}.yaml").splitlines(), "```"]


TABLES = {
    "graph": graph_block,
    "settings": settings_table,
    "inputs": inputs_table,
    "once": once_table,
    "command": command_tables,
}


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"kfp_ddp.{module}"), name)


def _range(field: Any) -> str:
    """The type of a field in words, with its bounds."""
    kind = typing.get_origin(field.annotation) or field.annotation
    bounds = {
        name: getattr(bound, name)
        for bound in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if getattr(bound, name, None) is not None
    }
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = ", ".join(f"{signs[name]} {bound:g}" for name, bound in bounds.items())
    name = {"tuple": "list"}.get(kind.__name__, kind.__name__)
    return f"{name}, {limits}" if limits else name


def _value(default: object) -> str:
    text = default if isinstance(default, str) else json.dumps(default)
    text = f"{default:g}" if isinstance(default, float) else text
    return "" if default in (None, "", (), [], {}) else f"`{text}`"


def _cell(text: str | None) -> str:
    return re.sub(r"([|<])", r"\\\1", " ".join((text or "").split()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
