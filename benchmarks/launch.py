"""From a job's success to the end of the step that waits for it, beside the Kubeflow SDK's wait.

A real PyTorchJob on the cluster of KUBECONFIG, a few rounds of different lengths. A watch of its
own notes when the API server first says that the job is Succeeded; our launch and
`wait_for_job_conditions` of kubeflow-training, with its default interval of 15 s, wait for the
same job at the same time. The job's last act is to print the time.

- `finish_latency_s`: seconds from Succeeded until our launch returned, all logs printed; median.
- `sdk_wait_s`: seconds from Succeeded until the SDK's wait returned; median.
- `last_line_to_end_s`: seconds from the job's last line until our launch returned, with what
  kubelet and operator take; its node's clock must agree with ours.
- `sdk_last_line_to_end_s`: the same for the SDK's wait.
"""

import contextlib
import io
import json
import os
import statistics
import threading
import time
import uuid

from kfp_ddp.components.shared.cluster.api import Api
from kfp_ddp.components.shared.launch.identity import identify
from kfp_ddp.components.shared.launch.job_state import state
from kfp_ddp.components.shared.launch.run import launch
from kfp_ddp.components.shared.launch.specification.kinds import KINDS
from kfp_ddp.components.shared.launch.specification.launch_spec import LaunchSpec

IMAGE = os.environ.get("KFP_DDP_BENCHMARK_IMAGE", "ghcr.io/kfp-ddp/trainer:0.1.0")
# Spread over the SDK's interval, so that none of its phases is favoured.
SECONDS = (2, 5, 8, 11, 14)


def run() -> dict[str, float]:
    """Measure every round; needs a cluster with the Training Operator and the image."""
    api = Api.connect()
    rounds = []
    print(f"{'job runs for':>14} {'ours':>8} {'kubeflow-training':>18}   from Succeeded")
    for seconds in SECONDS:
        measured = _round(api, seconds)
        rounds.append(measured)
        mine, sdk = measured["finish_latency_s"], measured["sdk_wait_s"]
        print(f"{seconds:12d} s {mine:6.2f} s {sdk:16.2f} s", flush=True)
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def _round(api: Api, seconds: int) -> dict[str, float]:
    """One job: how long after its last line and its success each of the two returned."""
    code = f"import time; time.sleep({seconds}); print('done', time.time())"
    spec = LaunchSpec.create(
        image=IMAGE,
        command=["python3", "-c", code],
        shm_size="",
        cpu_request="20m",
        run_as_user=1000,
    )
    run_id = f"benchmark-{uuid.uuid4().hex[:8]}"
    name = identify(run_id, "launch", "", spec).job_name(0)
    path = KINDS[spec.kind].path(api.namespace, name)
    times: dict[str, float] = {}
    threads = [
        threading.Thread(target=_observe, args=(api.another(), name, times)),
        threading.Thread(target=_sdk, args=(api, name, times)),
    ]
    for thread in threads:
        thread.start()
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        launch(spec, run_id, "launch", "", api)
    times["ours"] = time.time()
    for thread in threads:
        thread.join()
    api.call("DELETE", path)
    line = next(each for each in log.getvalue().splitlines() if "] done " in each)
    last = float(line.rpartition(" ")[2])
    return {
        "finish_latency_s": times["ours"] - times["succeeded"],
        "sdk_wait_s": times["sdk"] - times["succeeded"],
        "last_line_to_end_s": times["ours"] - last,
        "sdk_last_line_to_end_s": times["sdk"] - last,
    }


def _observe(api: Api, name: str, times: dict[str, float]) -> None:
    """Note when a watch first shows the job Succeeded."""
    path = KINDS["pytorchjob"].path(api.namespace)
    query = {"watch": "true", "fieldSelector": f"metadata.name={name}"}
    for line in api.lines(path, query, 120):
        if state(json.loads(line)["object"]).phase == "succeeded":
            times["succeeded"] = time.time()
            return


def _sdk(api: Api, name: str, times: dict[str, float]) -> None:
    """The SDK's wait, from when the job is there."""
    from kubeflow.training import TrainingClient

    client = TrainingClient(namespace=api.namespace)
    while True:
        try:
            client.get_job(name, job_kind="PyTorchJob")
            break
        except RuntimeError:
            time.sleep(0.1)
    client.wait_for_job_conditions(name, job_kind="PyTorchJob")
    times["sdk"] = time.time()
