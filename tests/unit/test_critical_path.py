"""How many steps of a pipeline wait for each other: on KFP each costs some ten seconds."""

import re
from collections.abc import Iterable
from pathlib import Path

from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.graph import Node, nodes

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`[\w`, ]+`) \| (\d+) \| (\d+) \|$", re.MULTILINE)


def longest(level: Iterable[Node]) -> tuple[Node, ...]:
    """The longest chain of steps and groups, what is in a group after the group itself."""
    ending: dict[str, tuple[Node, ...]] = {}
    for node in level:
        before = max((ending[name] for name in node.after), key=len, default=())
        ending[node.name] = (*before, node, *longest(node.inner))
    return max(ending.values(), key=len, default=())


def test_the_page_counts_the_steps_and_groups_that_a_run_waits_for() -> None:
    found = {}
    for name in NAMES:
        chain = longest(nodes(ROOT / "compiled" / f"{name}.yaml"))
        groups = sum(bool(node.inner) for node in chain)
        found[name] = (len(chain) - groups, groups)
    told = {
        name: (int(steps), int(groups))
        for names, steps, groups in ROW.findall((ROOT / "docs" / "scale.md").read_text())
        for name in re.findall(r"\w+", names)
    }
    assert told == found
