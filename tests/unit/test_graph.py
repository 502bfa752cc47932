"""The graph of a compiled pipeline, its Mermaid flowchart, and its longest chain."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from kfp import compiler, dsl

from kfp_ddp.cli.pipelines import graph
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.pipelines import NAMES
from kfp_ddp.pipelines.graph import Node, mermaid, nodes

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "compiled" / "train_resnet.yaml"


@dsl.component(base_image="python:3.12")  # type: ignore[untyped-decorator]
def score(rate: float) -> float:
    """A step."""
    return rate


@dsl.component(base_image="python:3.12")  # type: ignore[untyped-decorator]
def tell() -> None:
    """The last step."""


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with an exit handler, a loop, three branches in it, and a pipeline in it."""

    @dsl.pipeline  # type: ignore[untyped-decorator]
    def twice(rate: float) -> None:
        score(rate=rate).after(score(rate=rate))

    @dsl.pipeline(name="nested")  # type: ignore[untyped-decorator]
    def pipeline(rates: list = [0.1]) -> None:  # type: ignore[type-arg]  # noqa: B006
        with dsl.ExitHandler(tell().set_display_name("Tell <all>"), name="work & play"):
            with dsl.ParallelFor([0.1, 0.2, 0.3], parallelism=2, name="trials") as rate:
                scored = score(rate=rate)
                with dsl.If(scored.output > 0.5):
                    score(rate=1.0)
                with dsl.Elif(scored.output == 0.1):
                    score(rate=2.0)
                with dsl.Else():
                    tell()
            with dsl.ParallelFor(rates) as rate:
                score(rate=rate)
            score(rate=0.2).after(twice(rate=0.1))

    file = tmp_path_factory.mktemp("nested") / "nested.yaml"
    compiler.Compiler().compile(pipeline, str(file))
    return file


def titles(level: tuple[Node, ...]) -> dict[str, tuple[str, ...]]:
    """The title of each step and group, with the titles inside."""
    graph = {}
    for node in level:
        graph[node.title] = tuple(inner.title for inner in node.inner)
        graph |= titles(node.inner)
    return graph


def test_nodes_are_in_the_order_of_their_dependencies() -> None:
    graph = {node.name: node for node in nodes(COMPILED)}
    first, group, last = graph.values()
    assert first.name == "preflight"
    assert group.after == ("preflight",)
    assert (last.name, last.on_exit, last.after) == ("teardown", True, (group.name,))
    inner = {node.name: node for node in group.inner}
    chain = [name for name, node in inner.items() if not node.inner]
    assert chain == ["data-sync", "dataset-volume", "train", "evaluate", "export", "gate"]
    assert [inner[name].after for name in chain] == [(), *((name,) for name in chain[:-1])]
    assert titles(nodes(COMPILED))["if blessed"] == ("publish: seal and upload", "if service")


def test_groups_loops_and_branches_have_titles(nested: Path) -> None:
    graph = titles(nodes(nested))
    assert graph["work & play"][0] == "trials, for each of 3, 2 at once"
    assert graph["trials, for each of 3, 2 at once"] == ("score", "one of")
    branches = ("if score-Output > 0.5", "else if score-Output == 0.1", "else")
    assert graph["one of"] == branches
    assert [len(graph[branch]) for branch in branches] == [1, 1, 1]
    assert graph["for each of rates"] == ("score-4",)
    assert graph["twice"] == ("score-2", "score")
    assert graph["Tell <all>, always"] == ()


def test_the_flowchart_declares_all_nodes(nested: Path) -> None:
    lines = mermaid(nested).splitlines()
    assert lines[0] == "flowchart LR"
    parts = [line.strip() for line in lines[1:]]
    assert parts.count("end") == sum(word.startswith("subgraph") for word in parts) == 8
    assert 'n0["work #38; play"]' in "\n".join(parts)
    assert '(["Tell #60;all#62;, always"])' in "\n".join(parts)
    declared = {re.split(r"[(\[]", word.removeprefix("subgraph "))[0] for word in parts}
    edges = [re.findall(r"n[0-9_]+", word) for word in parts if "->" in word]
    assert len(edges) == 4
    assert all(end in declared for edge in edges for end in edge)


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    shown = CliRunner().invoke(graph, [str(COMPILED)], catch_exceptions=False)
    assert shown.output == mermaid(COMPILED)
    target = tmp_path / "steps.mmd"
    arguments = [str(COMPILED), "--mermaid", "-o", str(target)]
    assert CliRunner().invoke(graph, arguments, catch_exceptions=False).output == ""
    assert target.read_text() == mermaid(COMPILED)
    refused = CliRunner().invoke(graph, [str(COMPILED), "-o", str(tmp_path / "no" / "x.mmd")])
    assert isinstance(refused.exception, StorageError)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"kind: Workflow\nspec: {}\n", "not a compiled pipeline"),
        (b"pipelineInfo: {name: p}\nroot: {dag: {tasks: {a: {}}}}\n", "can be drawn"),
        (
            b"pipelineInfo: {name: p}\n"
            b"root: {dag: {tasks: {a: {componentRef: {name: c}, dependentTasks: [a]}}}}\n"
            b"components: {c: {}}\n",
            "can be drawn",
        ),
        (
            b"pipelineInfo: {name: p}\n"
            b"root: {dag: &d {tasks: {a: {componentRef: {name: c}}}}}\n"
            b"components: {c: {dag: *d}}\n",
            "without end",
        ),
    ],
)
def test_no_pipeline_is_rejected_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "given.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        mermaid(file)
    with pytest.raises(InputError, match="cannot be read"):
        mermaid(tmp_path / "absent.yaml")


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
