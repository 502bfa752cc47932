"""The dashboard and the alerts use metrics that a training has."""

import json
import re
from pathlib import Path

from tests.training_ranks import config, dataset, output_of

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
ON_A_GPU = {"kfp_ddp_step_memory_gb", "kfp_ddp_step_mfu"}
LABEL = "kfp_ddp_run_id"


def test_metrics_of_dashboard_and_alerts_exist(tmp_path: Path) -> None:
    run = config(dataset(tmp_path / "data"), tmp_path / "run", epochs=1, warmup_epochs=0)
    output_of(run, 1)
    served = set(ON_A_GPU)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        numbers = (name for name, value in event.items() if isinstance(value, int | float))
        served |= {f"kfp_ddp_{event['event']}_{name}" for name in numbers}
    for file in ("dashboard/trainings.json", "alerts/prometheusrule.yaml"):
        named = set(re.findall(r"kfp_ddp_\w+", (MONITORING / file).read_text())) - {LABEL}
        assert len(named) > 5, file
        assert named - served == set(), file
