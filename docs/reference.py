"""`python -m docs.reference [--check]`: write the generated parts of files.

Tables in READMEs are generated from models of settings, components and commands: text between

    <!-- settings: training.config.TrainConfig -->   and   <!-- /settings -->
    <!-- inputs: train -->                           and   <!-- /inputs -->
    <!-- command: schedule -->                       and   <!-- /command -->
    <!-- once: config.Config -->                     and   <!-- /once -->
    <!-- graph: train_resnet -->                     and   <!-- /graph -->

The names of torchvision's classifiers and weights are in a file, so that no torch is needed. All
references to our images get the version of the package as tag. `docs.components` has the files
components/*/component.yaml, `docs.component_readmes` the heads of the READMEs beside them.
"""

import dataclasses
import importlib
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.component_readmes import MARKER, head
from docs.components import component_files
from kfp_ddp import __version__
from kfp_ddp.core.settings import Settings
from kfp_ddp.plan.form import choices, description
from kfp_ddp.training.spec import timm_networks
from kfp_ddp.training.spec.torchvision_weights import DEFAULT, PUBLISHED, TABLE

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/*.md", "training/README.md", "components/*/README.md")
NAMING_IMAGES = (
    *("components/*/component.py", "deploy/**/*.yaml", "images/README.md", "images/*/Dockerfile"),
    *(".ci/run", "deploy/README.md", "benchmarks/**/*.py", "tests/**/*.py"),
)
IMAGE = re.compile(
    r"((?:kfp-ddp|\$REGISTRY)/(?:launcher|server|trainer):|\$image:|kfp-ddp//deploy[\w/-]*\?ref=v)"
    r"\d[\w.+-]*\w"
)
BLOCK = re.compile(
    r"(<!-- (settings|inputs|command|once|graph): (\S+) -->\n).*?(<!-- /\2 -->)", re.S
)
TYPES = {"String": "str", "Integer": "int", "Float": "float", "Boolean": "bool"}


def main(arguments: list[str]) -> int:
    """Write stale files, or with --check only list them; return 1 if it found any."""
    check, stale = "--check" in arguments, False
    for path, text in (*_documents(), *component_files(ROOT)):
        if not path.exists() or path.read_text() != text:
            stale = True
            print(path.relative_to(ROOT), "is stale" if check else "is updated")
            if not check:
                path.write_text(text)
    if check and stale:
        print("run `make reference` and commit the result")
    return int(check and stale)


def _documents() -> Iterator[tuple[Path, str]]:
    yield TABLE, torchvision_weights()
    yield timm_networks.TABLE, networks_of_timm()
    paths = {path for pattern in (*DOCUMENTS, *NAMING_IMAGES) for path in ROOT.glob(pattern)}
    for path in sorted(paths):
        text = path.read_text()
        if path.suffix == ".md":
            text = BLOCK.sub(_block, text)
        if path.match("components/*/README.md"):
            text = head(path.parent) + MARKER + text.partition(MARKER)[2]
        yield path, IMAGE.sub(rf"\g<1>{__version__}", text)


def torchvision_weights() -> str:
    """Return the expected text of the table of torchvision's weights, the default ones first."""
    from torchvision import models

    lines = []
    for network in models.list_models(module=models):
        names = models.get_model_weights(network)
        for one in dict.fromkeys((names[DEFAULT], *names)):
            folder, _, file = one.url.rpartition("/")
            assert folder == PUBLISHED, one.url
            lines.append(f"{network} {one.name} {file}\n")
    return "".join(lines)


def networks_of_timm() -> str:
    """Return the expected text of the table of timm's networks."""
    import timm

    networks: dict[str, dict[str, Any]] = {}
    for network in timm.list_models():
        default: Any = timm.get_pretrained_cfg(network)
        networks[network] = {default.tag if _is_on_hub(network, default) else "": default}
    for name in timm.list_models(pretrained=True):
        network, _, tag = name.partition(".")
        if _is_on_hub(network, one := timm.get_pretrained_cfg(name)):
            networks[network].setdefault(tag, one)
    rows = ((network, *row) for network, tags in networks.items() for row in tags.items())
    return "".join(
        f"{network} {tag or '-'} {one.crop_pct} "
        f"{','.join(map(str, one.mean))} {','.join(map(str, one.std))}\n"
        for network, tag, one in rows
    )


def _is_on_hub(network: str, one: Any) -> bool:
    return bool(one.tag) and one.hf_hub_id == f"timm/{network}.{one.tag}"


def _block(match: re.Match[str]) -> str:
    lines = TABLES[match[2]](match[3])
    return match[1] + "\n".join(lines) + "\n" + match[4]


def settings_table(path: str) -> list[str]:
    """Return a table of the fields of a model."""
    model: type[Settings] = _named(path)
    lines = ["| Setting | Is | Default | Meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if name not in model.set_by_step:
            kind = ", ".join(f"`{one}`" for one in model.choices(name) if one) or _range(field)
            default = "required"
            if not field.is_required():
                default = _value(field.get_default(call_default_factory=True))
            lines.append(f"| `{name}` | {kind} | {default} | {_cell(field.description)} |")
    return lines


def inputs_table(name: str) -> list[str]:
    """Return a table of the inputs of a component or a pipeline; the latter has a dot."""
    path = name if "." in name else f"components.{name}.component.{name}"
    inputs = _named(path).component_spec.inputs
    lines = ["| Input | Type | Default | What |", "|---|---|---|---|"]
    for one, spec in inputs.items():
        if spec.type == "TaskConfig":
            continue  # KFP fills it in
        kind = spec.type.removeprefix("system.").partition("@")[0]
        default = _value(spec.default) if spec.optional else "required"
        text = _cell(spec.description or description(one))
        kind = TYPES.get(kind, kind.lower())
        if kind == "str":  # a mapping may have the name of a setting
            kind = ", ".join(f"`{choice}`" for choice in choices(one)) or kind
        lines.append(f"| `{one}` | {kind} | {default} | {text} |")
    return lines


def once_table(path: str) -> list[str]:
    """Return a table of the described fields of a dataclass, with their environment variables."""
    from kfp_ddp.core.config import PREFIX

    lines = ["| Setting | In the environment | Default | Meaning |"]
    lines.append("|---|---|---|---|")
    for field in (one for one in dataclasses.fields(_named(path)) if one.metadata):
        variables = [PREFIX + field.name.upper(), field.metadata.get("variable")]
        names = ", ".join(f"`{variable}`" for variable in variables if variable)
        text = _cell(field.metadata["description"])
        lines.append(f"| `{field.name}` | {names} | {_value(field.default)} | {text} |")
    return lines


def command_tables(name: str) -> list[str]:
    """Return tables of the options of a command, or of each command of a group."""
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
        options = [param for param in command.params if isinstance(param, click.Option)]
        options = [option for option in options if not option.hidden]
        once = [option.opts[0] for option in options if option.name in FIELDS]
        options = [option for option in options if option.name not in FIELDS]
        lines += ["| Option | Default | What |", "|---|---|---|"] if options else []
        for option in options:
            names = ", ".join(f"`{opt}`" for opt in (*option.opts, *option.secondary_opts))
            shown = option.default if isinstance(option.default, str | int | float) else ""
            default = "" if option.is_flag and not option.default else _value(shown)
            known = ", ".join(f"`{one}`" for one in getattr(option.type, "choices", ()) if one)
            text = _cell(option.help) + (f" One of {known}." if known else "")
            lines.append(f"| {names} | {default} | {text} |")
        if once:
            lines += ["", f"Also {', '.join(f'`{opt}`' for opt in once)}: [set once](#set-once)."]
    return lines


def graph_block(name: str) -> list[str]:
    """Return the Mermaid flowchart of a committed pipeline."""
    from docs.flowchart import mermaid

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
