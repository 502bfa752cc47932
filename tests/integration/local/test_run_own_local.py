"""`kfp-ddp run FILE --local`: any compiled pipeline on this machine."""

from pathlib import Path

import pytest
from kfp import compiler, components, dsl

from kfp_ddp.client.run.run_info import local_run
from kfp_ddp.core.container_images import PUBLIC
from kfp_ddp.pipelines.compiled import pipelines_of, write
from kfp_ddp.pipelines.document import read
from tests.commands import call, output
from tests.conftest import CHECKOUT

PROGRAM = """
from kfp import dsl

@dsl.component(base_image="python:3.12")
def add(a: int, b: int) -> int:
    if a % 2:
        raise ValueError("a is odd")
    return a + b

@dsl.component(base_image="python:3.12")
def save(number: int):
    import os, pathlib
    step = pathlib.Path(os.environ["KFP_DDP_WORK_DIR"]) / "run/task/checkpoints/step-00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text('{"step": 1, "files": {"state.pt": {"sha256": ""}}}')
    raise ValueError("no disk")

@dsl.pipeline(name="rounds")
def rounds():
    with dsl.ParallelFor([1]) as number:
        save(number=number)

@dsl.pipeline(name="sums")
def sums(rounds: int, more: int = 2):
    add(a=rounds, b=more)
"""

LOOPS = """
from typing import Dict, List, NamedTuple
from kfp import dsl

@dsl.component(base_image="python:3.12")
def first() -> NamedTuple("First", [("words", List[str]), ("records", List[Dict[str, str]])]):
    return ["p", "q"], [{"a": "1"}]

@dsl.component(base_image="python:3.12")
def write(outer: str, inner: str, field: str, whole: list, given: str):
    import os, pathlib, uuid
    line = " ".join([outer, inner, field, *whole, given])
    (pathlib.Path(os.environ["KFP_DDP_WORK_DIR"]) / uuid.uuid4().hex).write_text(line)

@dsl.pipeline(name="{name}")
def {name}(given: str = "g", numbers: List[str] = ["x", "y"]):
    done = first()
    with dsl.ParallelFor({outer}) as outer:
        with dsl.ParallelFor({inner}) as inner:
            words = done.outputs["words"]
            write(outer={item}, inner=inner, field="{name}", whole=words, given=given)
"""
LOOPED = {
    "constants": ('["a", "b"]', '["x"]', "outer", "ab", "x"),
    "outputs": ('done.outputs["records"]', 'done.outputs["words"]', "outer.a", "1", "pq"),
    "parameters": ("numbers", 'done.outputs["words"]', "outer", "xy", "pq"),
    "fields": ('done.outputs["records"]', "numbers", "outer.a", "1", "xy"),
}
"""Items of the outer and of the inner loop, what is taken of an outer item, and all values."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the pipelines to an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    write(pipelines_of(tmp_path / "program.py"), tmp_path)


def test_own_pipeline_runs_and_shows_its_outputs() -> None:
    shown = output("run", "sums.yaml", "--local", "--set", "rounds=4")
    assert shown.startswith("sums on this machine\n\n  ✓ add             6 ")
    assert "the results are in run-output/sums/" in shown
    run = local_run(Path("run-output/sums"))
    assert (run.state, run.step("add").state) == ("SUCCEEDED", "SUCCEEDED")
    times = (run.start, run.steps[0].start, run.steps[0].end, run.end)
    assert sorted(filter(None, times)) == list(times)


def test_failed_step_is_one_line_with_its_reason() -> None:
    failed = call("run", "sums.yaml", "--local", "--set", "rounds=3", "--output", "mine")
    assert "add failed: ValueError: a is odd; the log is" in str(failed.exception)
    assert Path("mine/pipeline.log").is_file()
    run = local_run(Path("mine"))
    assert (run.state, run.step("add").state) == ("FAILED", "FAILED")


@pytest.mark.slow
def test_fresh_starts_an_interrupted_run_over() -> None:
    words = ("run", "sums.yaml", "--local", "--set", "rounds=3")
    runs = [call(*words, *more) for more in ((), ("--fresh",), ())]
    logs = [f"run-output/{name}/pipeline.log" for name in ("sums", "sums-2", "sums-2")]
    for one, log in zip(runs, logs, strict=True):
        assert str(one.exception).endswith(log)
    assert ["resuming" in one.output for one in runs] == [False, False, True]


def test_pipeline_with_a_loop_does_not_promise_to_resume() -> None:
    failed = call("run", "rounds.yaml", "--local")
    assert "ValueError: no disk" in str(failed.exception)
    assert list(Path("run-output/rounds").glob("work/run/task/checkpoints/step-*"))
    assert "resume" not in f"{failed.exception}{failed.output}"


def test_component_of_a_file_is_compiled_by_kfp_alone_and_runs() -> None:
    """As `load_component_from_url` gives it to an author without our package."""
    gate = components.load_component_from_file(str(CHECKOUT / "components/gate/component.yaml"))

    @dsl.pipeline(name="judged")  # type: ignore[untyped-decorator]
    def judged(accuracy: float = 0.9) -> None:
        gate(accuracy=accuracy, rules={"min_accuracy": 0.5})

    compiler.Compiler().compile(judged, "judged.yaml")
    assert read(Path("judged.yaml")).images() == [PUBLIC["launcher"]]
    for accuracy, blessed in ((0.9, True), (0.4, False)):
        shown = output("run", "judged.yaml", "--local", "--set", f"accuracy={accuracy}")
        assert f"blessed {blessed}" in shown


@pytest.mark.parametrize("name", LOOPED)
def test_steps_of_a_loop_get_the_values_that_they_ask_for(name: str) -> None:
    """The loops of kfp.local 2.17 put the item in the place of other inputs."""
    outer, inner, item, outers, inners = LOOPED[name]
    text = LOOPS
    for key, word in {"name": name, "outer": outer, "inner": inner, "item": item}.items():
        text = text.replace(f"{{{key}}}", word)
    Path("loops.py").write_text(text)
    write(pipelines_of(Path("loops.py")), Path())
    output("run", f"{name}.yaml", "--local")
    lines = [path.read_text() for path in Path(f"run-output/{name}/work").iterdir()]
    assert sorted(lines) == [f"{one} {two} {name} p q g" for one in outers for two in inners]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sums.yaml"], "rounds is missing"),
        (["sums.yaml", "--gpus", "1"], "--gpus is for a run on KFP"),
        (["sums.yaml", "--replace"], "--replace is for --output"),
        (["sums.yaml", "--epochs", "3"], "there is no setting 'epochs'"),
        (["sums.yaml", "--image-size", "3"], "--set image_size=VALUE"),
        (["sums.yaml", "--zzz"], "no option --zzz\n"),
        (["sums.yaml", "--epoch", "3"], "did you mean --epochs?"),
        (["sums.yaml", "--ranks", "2"], "--ranks is for train_resnet"),
        (["sums.yaml", "--pipeline", "retrain"], "are two pipelines"),
        (["photos", "--pipeline", "mine"], "with --local, --pipeline is one of train_resnet,"),
    ],
)
def test_invalid_input_is_one_line(words: list[str], line: str) -> None:
    done = call("run", *words, "--local")
    assert line in f"{done.exception}{done.output}"
    assert not Path("run-output").exists()
