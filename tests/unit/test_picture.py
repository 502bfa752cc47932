"""A compiled pipeline as a picture and as a Mermaid flowchart: ours, and any that kfp compiles."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner
from kfp import compiler, dsl

from kfp_ddp.cli.graph import command
from kfp_ddp.core.errors import InputError, StorageError
from kfp_ddp.pipelines import NAMES, picture
from kfp_ddp.pipelines.graph import Node, nodes
from kfp_ddp.pipelines.mermaid import mermaid

COMPILED = Path(__file__).parents[2] / "compiled" / "train_resnet.yaml"
SVG = "{http://www.w3.org/2000/svg}"


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
    found = {}
    for node in level:
        found[node.title] = tuple(inner.title for inner in node.inner)
        found |= titles(node.inner)
    return found


def test_the_steps_stand_in_the_order_of_their_dependencies() -> None:
    found = {node.name: node for node in nodes(COMPILED)}
    first, group, last = found.values()
    assert first.name == "preflight"
    assert group.after == ("preflight",)
    assert (last.name, last.on_exit, last.after) == ("teardown", True, (group.name,))
    inner = {node.name: node for node in group.inner}
    chain = [name for name, node in inner.items() if not node.inner]
    assert chain == ["data-sync", "dataset-volume", "train", "evaluate", "export", "gate"]
    assert [inner[name].after for name in chain] == [(), *((name,) for name in chain[:-1])]
    assert titles(nodes(COMPILED))["if blessed"] == ("publish: seal and upload", "if service")


def test_groups_loops_and_branches_stay_what_they_are(nested: Path) -> None:
    found = titles(nodes(nested))
    assert found["work & play"][0] == "trials, for each of 3, 2 at once"
    assert found["trials, for each of 3, 2 at once"] == ("score", "one of")
    branches = ("if score-Output > 0.5", "else if score-Output == 0.1", "else")
    assert found["one of"] == branches
    assert [len(found[branch]) for branch in branches] == [1, 1, 1]
    assert found["for each of rates"] == ("score-4",)
    assert found["twice"] == ("score-2", "score")
    assert found["Tell <all>, always"] == ()


@pytest.mark.parametrize("which", ["ours", "nested"])
def test_the_picture_is_whole_and_needs_nothing_from_elsewhere(which: str, nested: Path) -> None:
    file = COMPILED if which == "ours" else nested
    drawn = picture.svg(file)
    root = ET.fromstring(drawn)
    words = [node.text for node in root.iter(f"{SVG}text")]
    for title in titles(nodes(file)):
        assert title.removesuffix(", always").partition(": ")[0] in words
    if which == "ours":
        assert {"train", "DDP on all ranks", "teardown", "always"} <= set(words)
        assert "leave nothing" not in words, "when it runs says more"
    assert "<script" not in drawn
    assert "href" not in drawn


def test_no_box_lies_over_another_and_none_leaves_its_group(nested: Path) -> None:
    placed, width, height = picture._arranged(nodes(nested))
    assert width > 0 < height
    apart(placed, width, height)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_of_ours_is_read_in_a_pages_column_at_its_own_size(name: str) -> None:
    level = nodes(COMPILED.with_name(f"{name}.yaml"))
    placed, width, height = picture._arranged(level)
    assert width <= picture.WIDEST
    apart(placed, width, height)


def apart(placed: tuple[picture.Placed, ...], width: int, height: int) -> None:
    """Compare each box with those beside it and with what holds it."""
    for at, (x, y, _, one) in enumerate(placed):
        assert 0 <= x <= width - one.width
        assert 0 <= y <= height - one.height
        for other_x, other_y, _, other in placed[:at]:
            beside = x >= other_x + other.width or other_x >= x + one.width
            assert beside or y >= other_y + other.height or other_y >= y + one.height
        apart(one.inner, one.width, one.height)


def test_the_flowchart_names_all_and_closes_its_groups(nested: Path) -> None:
    lines = mermaid(nested).splitlines()
    assert lines[0] == "flowchart LR"
    words = [line.strip() for line in lines[1:]]
    assert words.count("end") == sum(word.startswith("subgraph") for word in words) == 8
    assert 'n0["work #38; play"]' in "\n".join(words)
    assert '(["Tell #60;all#62;, always"])' in "\n".join(words)
    declared = {re.split(r"[(\[]", word.removeprefix("subgraph "))[0] for word in words}
    edges = [re.findall(r"n[0-9_]+", word) for word in words if "->" in word]
    assert len(edges) == 4
    assert all(end in declared for edge in edges for end in edge)


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    shown = CliRunner().invoke(command, [str(COMPILED)], catch_exceptions=False)
    assert shown.output == picture.svg(COMPILED)
    target = tmp_path / "steps.mmd"
    asked = [str(COMPILED), "--mermaid", "-o", str(target)]
    assert CliRunner().invoke(command, asked, catch_exceptions=False).output == ""
    assert target.read_text() == mermaid(COMPILED)
    gone = CliRunner().invoke(command, [str(COMPILED), "-o", str(tmp_path / "no" / "x.svg")])
    assert isinstance(gone.exception, StorageError)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00\x01{{{", "is no YAML"),
        (b"kind: Workflow\nspec: {}\n", "is no compiled pipeline"),
        (b"- 1\n", "is no compiled pipeline"),
        (
            b"pipelineInfo: {name: p}\nroot: {dag: {tasks: {a: {}}}}\n",
            "is no pipeline that can be drawn",
        ),
        (b"root: {dag: 3}\n", "is no compiled pipeline"),
        (
            b"pipelineInfo: {name: p}\n"
            b"root: {dag: {tasks: {a: {componentRef: {name: c}, dependentTasks: [a]}}}}\n"
            b"components: {c: {}}\n",
            "is no pipeline that can be drawn",
        ),
        (
            b"pipelineInfo: {name: p}\n"
            b"root: {dag: &d {tasks: {a: {componentRef: {name: c}}}}}\n"
            b"components: {c: {dag: *d}}\n",
            "groups in groups without end",
        ),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused_in_one_line(
    content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "given.yaml"
    file.write_bytes(content)
    with pytest.raises(InputError, match=said) as refused:
        picture.svg(file)
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="cannot be read"):
        picture.svg(tmp_path / "absent.yaml")
