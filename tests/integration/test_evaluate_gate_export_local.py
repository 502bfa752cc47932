"""The components after a training, as KFP runs them: compiled, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROGRAM = """
import sys
from kfp import compiler, components, dsl, local
from kfp_ddp.components.evaluate.component import evaluate
from kfp_ddp.components.export.component import export
from kfp_ddp.components.gate.component import gate
from kfp_ddp.components.publish.component import publish

@dsl.pipeline(name="last-steps")
def last_steps(checkpoint: str, run_dir: str, data: str, rules: dict, destination: str):
    champion = f"{destination}/squares"
    found = evaluate(
        checkpoint=checkpoint, run_dir=run_dir, dataset_path=data, champion=champion
    )
    exported = export(
        checkpoint=checkpoint,
        run_dir=run_dir,
        dataset_path=data,
        evaluation=found.outputs["evaluation"],
        model_name="squares",
    )
    verdict = gate(
        accuracy=found.outputs["accuracy"],
        evaluation=found.outputs["evaluation"],
        bundle=exported.outputs["Output"],
        rules=rules,
        champion=champion,
    )
    with dsl.If(verdict.outputs["Output"] == True):
        publish(
            bundle=exported.outputs["Output"],
            evaluation=found.outputs["evaluation"],
            model_name="squares",
            destination=destination,
            champion=champion,
            champion_version=verdict.outputs["champion_version"],
        )

root, checkpoint, run_dir, data, minimum = sys.argv[1:]
compiler.Compiler().compile(last_steps, f"{root}/pipeline.yaml")
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=f"{root}/artifacts")
components.load_component_from_file(f"{root}/pipeline.yaml")(
    checkpoint=checkpoint, run_dir=run_dir, data=data,
    rules={"min_accuracy": float(minimum), "min_class_recall": 0.01},
    destination=f"{root}/models",
)
"""


def run(root: Path, checkpoint: Path, run_dir: Path, data: Path, minimum: float) -> None:
    program = root / "program.py"
    program.write_text(PROGRAM)
    (root / "models").mkdir()
    arguments = [str(root), str(checkpoint), str(run_dir), str(data), str(minimum)]
    subprocess.run([sys.executable, str(program), *arguments], check=True)


def written(root: Path, task: str) -> list[Path]:
    return sorted(root.glob(f"artifacts/*/{task}/*"))


@pytest.mark.slow
@pytest.mark.parametrize(("minimum", "blessed"), [(0.34, True), (1.0, False)])
def test_from_checkpoint_to_destination(
    trained_checkpoint: Path,
    trained_dataset: Path,
    trained_run: Path,
    tmp_path: Path,
    minimum: float,
    blessed: bool,
) -> None:
    run(tmp_path, trained_checkpoint, trained_run, trained_dataset, minimum)
    names = {path.name for path in written(tmp_path, "evaluate")}
    assert {"evaluation_report", "evaluation_summary", "executor_output.json"} <= names
    verdict = next(tmp_path.glob("artifacts/*/gate/gate_verdict")).read_text()
    assert verdict.startswith("## Blessed" if blessed else "## Not blessed")
    assert "holds: there is no champion at" in verdict
    assert bool(list(tmp_path.glob("models/squares/*/_SUCCESS"))) == blessed
    assert (trained_run / "bundle" / "_SUCCESS").exists()
    assert (trained_run / "bundle" / "verdict.json").exists() == blessed
    if blessed:
        output = next(tmp_path.glob("artifacts/*/publish/executor_output.json"))
        model = json.loads(output.read_text())["artifacts"]["published_model"]["artifacts"][0]
        assert model["metadata"]["uri"].startswith(f"{tmp_path}/models/squares/")


def test_the_gate_needs_no_torch() -> None:
    code = (
        "import sys, kfp_ddp.evaluation.gate.engine, kfp_ddp.report\n"
        "assert not {'torch', 'numpy', 'PIL', 'google.cloud.storage'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_input_has_a_help_text(tmp_path: Path) -> None:
    compile_all = (
        "import sys\nfrom kfp import compiler\n"
        "from kfp_ddp.components.evaluate.component import evaluate\n"
        "from kfp_ddp.components.export.component import export\n"
        "from kfp_ddp.components.gate.component import gate\n"
        "from kfp_ddp.components.publish.component import publish\n"
        "for c in (evaluate, export, gate, publish):\n"
        "    compiler.Compiler().compile(c, f'{sys.argv[1]}/{c.name}.yaml')\n"
    )
    subprocess.run([sys.executable, "-c", compile_all, str(tmp_path)], check=True)
    files = sorted(tmp_path.glob("*.yaml"))
    assert [file.stem for file in files] == ["evaluate", "export", "gate", "publish"]
    for file in files:
        spec = next(yaml.safe_load_all(file.read_text()))
        inputs = spec["root"]["inputDefinitions"]["parameters"]
        assert all(given.get("description") for given in inputs.values()), file.stem
