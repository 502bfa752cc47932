"""The longest chain of steps of each pipeline: on KFP each step takes some ten seconds."""

import re
from collections.abc import Iterable
from pathlib import Path

from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.graph import Node, nodes

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`[\w`, ]+`) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def longest(level: Iterable[Node]) -> tuple[Node, ...]:
    """Return the longest chain of steps and groups; members of a group follow it."""
    ending: dict[str, tuple[Node, ...]] = {}
    for node in level:
        before = max((ending[name] for name in node.after), key=len, default=())
        ending[node.name] = (*before, node, *longest(node.inner))
    return max(ending.values(), key=len, default=())


def test_docs_have_the_number_of_steps_and_groups() -> None:
    counts = {}
    for name in NAMES:
        chain = longest(nodes(ROOT / "compiled" / f"{name}.yaml"))
        groups = sum(bool(node.inner) for node in chain)
        counts[name] = (len(chain) - groups, groups)
    documented = {
        name: (int(steps), int(groups))
        for names, steps, groups in ROW.findall((ROOT / "docs" / "scale.md").read_text())
        for name in re.findall(r"\w+", names)
    }
    assert documented == counts
