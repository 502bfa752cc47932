"""The form of a compiled pipeline, the order of its steps, and its longest chain."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from docs.flowchart import Node, nodes
from kfp_ddp.core.errors import InputError
from kfp_ddp.pipelines import NAMES, document
from kfp_ddp.pipelines.document import parsed
from kfp_ddp.pipelines.form import Form, check_arguments, form_of
from kfp_ddp.training.spec import model_file
from tests.commands import output
from tests.files import write

ROOT = Path(__file__).parents[3]
COMPILED = ROOT / "compiled" / "train_resnet.yaml"


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        *(("epochs=3", {"epochs": 3}), ("training.epochs=3", {"epochs": 3})),
        ("learning_rate=1e-2", {"training": {"learning_rate": 0.01}}),
        ("training.deterministic=true", {"training": {"deterministic": True}}),
        *(("cpu=2", {"job": {"cpu": "2"}}), ("include=*.jpg", {"sync": {"include": ["*.jpg"]}})),
        ("exclude=[a, b/**]", {"sync": {"exclude": ["a", "b/**"]}}),
        ("script_args=--lr 1", {"training": {"script_args": "--lr 1"}}),
        ("dataset=", {"sync": {"dataset": ""}}),
        ("gate={min_accuracy: 0.9}", {"gate": {"min_accuracy": 0.9}}),
        ("gpus_per_node=-1", {"gpus_per_node": -1}),
    ],
)
def test_word_becomes_a_typed_argument(word: str, arguments: dict[str, Any]) -> None:
    assert form_of("train_resnet").read(None, [word]) == arguments


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("epoch=3", "there is no setting 'epoch'; did you mean 'epochs'?"),
        ("exclude=@no.csv", "cannot be used: @no.csv cannot be read (No such file or directory)"),
        ("trainng.epochs=3", "there is no 'trainng'; did you mean 'training'?"),
        ("training={colour: 1}", "there is no setting 'training.colour'"),
        ("epochs=ten", "epochs='ten' cannot be used: it should be a valid integer"),
        ("epochs", "--set 'epochs' is not a setting; write key=value, such as epochs=10"),
        ("output_dir=/tmp", "there is no setting 'output_dir'"),
    ],
)
def test_invalid_word_fails_with_one_line_error(word: str, line: str) -> None:
    with pytest.raises(InputError, match=re.escape(line)):
        form_of("train_resnet").read(None, [word])


def test_names_of_a_table_are_excluded(tmp_path: Path) -> None:
    table = tmp_path / "labels_to_check.csv"
    table.write_text("path,label\nval/cat/1.jpg,cat\n,,\n*[2]?.jpg,dog\n'=1.jpg,dog\n")
    arguments = form_of("train_resnet").read(None, [f"exclude=['@eaDir/**', '@{table}']"])
    named = ["/val/cat/1.jpg", r"/\*[2]\?.jpg", "/=1.jpg"]
    assert arguments == {"sync": {"exclude": ["@eaDir/**", *named]}}
    for name in ("val/cat/1.jpg", "val/cat/2.jpg"):
        write(tmp_path / "source" / name, name)
    output("sync", tmp_path / "source", tmp_path / "copy", "--exclude", f"@{table}")
    assert [path.name for path in (tmp_path / "copy/current").glob("val/cat/*")] == ["2.jpg"]
    rows = "".join(f"{number}.jpg\n" for number in range(1001))
    for content in ("", "name\n1.jpg\n", f"path\n{rows}"):
        table = table.replace(table.with_suffix(".txt" if content else ".csv"))
        table.write_text(content)
        with pytest.raises(InputError, match=r": @\S*labels_to_check\.\w+ (cannot|has 1,001)"):
            form_of("train_resnet").read(None, [f"exclude=@{table}"])


def test_script_and_table_are_settings_of_the_training(tmp_path: Path) -> None:
    file = write(tmp_path / "train.py", "print('hi')\n")
    given = form_of("train_resnet").read(None, [f"script={file}"])
    assert given == {"training": {"script": model_file.pack(file)}}
    given = form_of("train_resnet").read(None, ["labels=labels.csv"])
    assert given == {"training": {"labels": "labels.csv"}}
    with pytest.raises(InputError, match=r"write job\.service_account or release\.service_account"):
        form_of("train_resnet").read(None, ["service_account=robot"])


def test_paths_of_a_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    for path in (home / "w.pth", here / "net.py", here / "~x/a.jpg", here / "photos/a.jpg"):
        write(path, "def build(classes): ...")
    write(here / "wrong.csv", "path\na.jpg\n")
    monkeypatch.setenv("HOME", f"{home}")
    text = (
        "{destination: ./new/models, champion: last, gate: {tags: tags.csv}, model: 'net.py:build',"
        " exclude: ['@wrong.csv'], training: {pretrained: ~/w.pth, labels: labels.csv}}"
    )
    form = form_of("train_resnet")
    file = write(here / "settings.yaml", text)
    given = form.read(file, ["source=~/photos", "model_name=photos"], local=True)
    assert given["destination"] == f"{here}/new/models"
    assert (given["source"], given["champion"]) == (f"{home}/photos", "last")
    assert (given["gate"]["tags"], given["training"]["labels"]) == ("tags.csv", "labels.csv")
    assert given["pretrained"] == f"{home}/w.pth"
    assert given["sync"]["exclude"] == ["/a.jpg"]
    assert (given["model"], given["model_name"]) == (f"{here}/net.py:build", "photos")
    on_cluster = form.read(file, ["source=~/photos"])  # refused there
    assert (on_cluster["destination"], on_cluster["source"]) == ("./new/models", "~/photos")
    assert on_cluster["training"]["model_code"] == given["training"]["model_code"]
    for text, place in (("~x", "~x"), ("~x/../photos", "photos"), ("./~/x", "~/x")):
        assert form.read(write(here / "s.yaml", f"source: '{text}'"), [], local=True) == {
            "source": f"{here}/{place}"
        }
    trials = "sweep: {trials: [{pretrained: ~/w.pth}], space: {pretrained: [./a.pth, false]}}"
    sweep = form_of("sweep").read(write(here / "s.yaml", trials), [])["sweep"]
    assert sweep["trials"] == [{"pretrained": f"{home}/w.pth"}]
    assert sweep["space"] == {"pretrained": [f"{here}/a.pth", False]}
    assert _own().read(write(here / "s.yaml", "words: ./photos"), [], local=True) == {
        "words": "./photos"
    }


def test_words_override_a_file(tmp_path: Path) -> None:
    text = "epochs: 30\ntraining: {seed: 1, cache_gb: 2}\nmin_accuracy: 0.9\n"
    file = write(tmp_path / "settings.yaml", text)
    assert form_of("train_resnet").read(file, ["seed=5", "epochs=2"]) == {
        "epochs": 2,
        "training": {"seed": 5, "cache_gb": 2.0},
        "gate": {"min_accuracy": 0.9},
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        *(("epochs: [", "is not YAML"), ("- epochs", "has no settings; write lines such as")),
        ("epochs: 1\nseed: 2\nepochs: 3", "epochs stands twice, in line 1 and in line 3"),
        ("gate:\n  tags: a\n  'tags': b", "tags stands twice, in line 2 and in line 3"),
        ("sweep:\n- {a: 1}\n- {a: [{b: 1, b: 1}]}", "b stands twice, in line 3 and in line 3"),
        ('{"epochs": 1,\n"epochs": 2}', "epochs stands twice, in line 1 and in line 2"),
        ("&a epochs: 1\n*a : 2", "epochs stands twice, in line 1 and in line 1"),
    ],
)
def test_invalid_file_fails_with_one_line_error(text: str, line: str, tmp_path: Path) -> None:
    file = write(tmp_path / "settings.yaml", text)
    with pytest.raises(InputError, match=re.escape(line)):
        form_of("train_resnet").read(file, [])


LAUGHS = "\n".join(f"- &a{one} [{f'*a{one - 1}, ' * 9}]" for one in range(1, 9))
ODD = [
    *("2020-13-45", "0x_", "9" * 5000, "[" * 100_000, "{a: " * 1200, "!!int ''", "!!bool x"),
    *(":".join("9" * 3000), ":".join("9" * 3000) + ".5", "0x" + "f" * 5000, "-.inf"),
    *("{.nan: 1}", "{? [a] : 1}", "{2020-01-01: 1}", "&a [*a]", "!!binary aGk=", "!!set {a}"),
    *(f"\n- &a0 [{'x, ' * 9}]\n{LAUGHS}", "{<<: [{a: 1}]}", f"'{'x' * (3 << 20)}'"),
]


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_value_that_yaml_cannot_build_is_one_line(text: str, tmp_path: Path) -> None:
    file = write(tmp_path / "p.yaml", f"epochs: {text}")
    for read in (lambda: form_of("train_resnet").read(file, []), lambda: document.read(file)):
        with pytest.raises(InputError, match=r"p\.yaml is not YAML: ") as caught:
            read()
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError):
        form_of("train_resnet").read(None, [f"epochs={text}"])


def test_integer_that_fits_no_float_is_one_line() -> None:
    form = form_of("train_resnet")
    with pytest.raises(InputError, match=r"^a number is too large: [^\n]*$"):
        check_arguments(form.pipeline, {"source": "gs://bucket/p", "epochs": 10**400})


OWN = """
pipelineInfo: {name: own}
root:
  dag: {tasks: {}}
  inputDefinitions:
    parameters:
      rounds: {parameterType: NUMBER_INTEGER, description: How often.}
      share: {parameterType: NUMBER_DOUBLE, defaultValue: 0.5}
      words: {parameterType: STRING, defaultValue: ''}
      loud: {parameterType: BOOLEAN, defaultValue: false}
      names: {parameterType: LIST, isOptional: true}
      training: {parameterType: STRUCT, defaultValue: {}}
      size: {parameterType: STRING, defaultValue: S, literals: [S, M, L]}
"""


def _own() -> Form:
    return Form(parsed(OWN, "own.yaml"))


@pytest.mark.parametrize(
    ("word", "argument"),
    [
        *(("rounds=3", 3), ("rounds=3.0", 3), ("share=1e-2", 0.01), ("words=12", "12")),
        *(("loud=true", True), ("names=[a, b]", ["a", "b"]), ("rounds=1e3", 1000)),
        *(("names=[1e-3, 0.01]", [0.001, 0.01]), ("words=1e-3", "1e-3")),
        *(("training={a: [1E-3], b: 1e5x}", {"a": [0.001], "b": "1e5x"}), ("share='2'", 2.0)),
        *(("training={colour: 1}", {"colour": 1}), ("size=M", "M")),
    ],
)
def test_word_has_the_type_of_the_pipelines_parameter(word: str, argument: object) -> None:
    (value,) = _own().read(None, [word]).values()
    assert (value, type(value)) == (argument, type(argument))


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("rounds=1.5", "rounds=1.5 cannot be used: it should be a whole number (How often)"),
        ("share=half", "share='half' cannot be used: it should be a number"),
        ("training=3", "it should be a mapping such as {a: 1}"),
        ("size=XL", "size='XL' is unknown: it is one of S, M, L"),
        ("round=3", "there is no setting 'round'; did you mean 'rounds'?"),
        ("training.seed=3", "training.seed: there is no 'training'"),
        ("x=3", "there is no setting 'x'; it has loud, names, rounds"),
    ],
)
def test_invalid_word_for_any_pipeline_is_an_error(word: str, line: str) -> None:
    with pytest.raises(InputError, match=re.escape(line)):
        _own().read(None, [word])


@pytest.mark.parametrize(
    ("word", "old", "gate"),
    [
        ("min_improvement=0.01", {}, {"min_accuracy": 0.7, "min_improvement": 0.01}),
        ("min_improvement=0.01", {"gate": {}}, {"min_improvement": 0.01}),
        ("gate={min_improvement: 0.01}", {}, {"min_improvement": 0.01}),
        ("gate={}", {"gate": {"min_accuracy": 0.8}}, {}),
    ],
)
def test_a_setting_is_added_to_a_default_that_a_mapping_replaces(
    word: str, old: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = form_of("train_resnet")
    monkeypatch.setitem(form.parameters["gate"], "defaultValue", {"min_accuracy": 0.7})
    assert form.read(None, [word], old) == {"gate": gate}
    with pytest.raises(InputError, match=r"^source is missing: give --set source=…"):
        form.check_complete({})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "it is empty"),
        ("a: b: c", "p.yaml is not YAML: mapping"),
        ("just words", "it is not a mapping"),
        ("kind: Workflow", "it is a Workflow of Kubernetes"),
        ("a: 1", "it has no pipelineInfo with a name"),
        ("pipelineInfo: {name: x}", "it has no root with steps"),
        (f"{OWN}---\na: 1", "its second document has no platforms"),
    ],
)
def test_invalid_document_fails_with_one_line_error(text: str, line: str) -> None:
    with pytest.raises(InputError, match=re.escape(line)):
        parsed(text, "p.yaml")


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
