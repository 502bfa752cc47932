"""What a launch takes: to see the end of a job, and as the job grows to a thousand pods.

From a job's success to the end of the step that waits for it, beside the Kubeflow SDK's wait.

A real PyTorchJob on the cluster of KUBECONFIG, a few rounds of different lengths. A watch of its
own notes when the API server first says that the job is Succeeded; our launch and
`wait_for_job_conditions` of kubeflow-training, with its default interval of 15 s, wait for the
same job at the same time. The job's last act is to print the time.

- `finish_latency_s`: seconds from Succeeded until our launch returned, all logs printed; median.
- `sdk_wait_s`: seconds from Succeeded until the SDK's wait returned; median.
- `last_line_to_end_s`: seconds from the job's last line until our launch returned, with what
  kubelet and operator take; its node's clock must agree with ours.
- `sdk_last_line_to_end_s`: the same for the SDK's wait.

Then a PyTorchJob of 1, 10, 100 and 1,000 workers (`KFP_DDP_BENCHMARK_PODS` for others), whose pods
run nothing, on nodes that are stood in for; API server, scheduler and operator are real. Of N
workers N/50 are replaced, all run for a while, and N/20 fail, one before the others.

- `decision_N_s`: seconds from when a watch of its own shows the job to have failed until our launch
  has printed the first cause and ended.
- `cpu_N`, `busiest_cpu_N`: of one core, over all of it and in its busiest 5 s.
- `rss_N_mb`: the most memory of the launch's process.
- `sockets_N`, `requests_N`: the most connections that were open at once, and all requests.
"""

import contextlib
import io
import json
import os
import statistics
import tempfile
import threading
import time
import uuid
from pathlib import Path

from benchmarks.launch_parts import kubelets, load
from kfp_ddp.jobs.identity import identify
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.jobs.run import launch
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.resource import NAMESPACES

IMAGE = os.environ.get("KFP_DDP_BENCHMARK_IMAGE", "ghcr.io/kfp-ddp/trainer:0.2.0")
# Spread over the SDK's interval, so that none of its phases is favoured.
SECONDS = (2, 5, 8, 11, 14)
PODS = os.environ.get("KFP_DDP_BENCHMARK_PODS", "1,10,100,1000")
RUN_SECONDS = 20.0


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
    figures = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return figures | _curve(api)


def _curve(api: Api) -> dict[str, float]:
    """Measure one job of each size, in a new namespace."""
    figures: dict[str, float] = {}
    if why := kubelets.find_obstacle(api):
        print(f"no curve over pods: {why}")
        return figures
    print(f"\n{'pods':>6} {'decision':>10} {'CPU':>6} {'busiest':>8} {'RSS':>8} sockets requests")
    for count in map(int, filter(None, PODS.split(","))):
        name = f"benchmark-{uuid.uuid4().hex[:8]}"
        api.create(NAMESPACES, {"metadata": {"name": name}})
        try:
            with tempfile.TemporaryDirectory() as folder:
                space = Api(api.client, name)
                failing, replaced = max(1, count // 20), count // 50
                failed = load.run_job(space, Path(folder), count, failing, replaced, RUN_SECONDS)
        finally:
            api.delete(NAMESPACES, name)
        decision, usage = failed.ended_at - failed.failed_at, failed.launch.usage
        print(
            f"{count:6d} {decision:8.2f} s {usage.cpu_share:6.3f} {usage.busiest_share:8.3f} "
            f"{usage.rss_mb:5.0f} MB {usage.sockets:7d} {usage.requests:8d}",
            flush=True,
        )
        figures |= {
            f"decision_{count}_s": decision,
            f"cpu_{count}": usage.cpu_share,
            f"busiest_cpu_{count}": usage.busiest_share,
            f"rss_{count}_mb": usage.rss_mb,
            f"sockets_{count}": usage.sockets,
            f"requests_{count}": usage.requests,
        }
    return figures


def _round(api: Api, seconds: int) -> dict[str, float]:
    """Return the seconds from the last line and the success of a job until both returned."""
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
    path = spec.job_kind.resource.path(api.namespace, name)
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
    line = next(one for one in log.getvalue().splitlines() if "] done " in one)
    last = float(line.rpartition(" ")[2])
    return {
        "finish_latency_s": times["ours"] - times["succeeded"],
        "sdk_wait_s": times["sdk"] - times["succeeded"],
        "last_line_to_end_s": times["ours"] - last,
        "sdk_last_line_to_end_s": times["sdk"] - last,
    }


def _observe(api: Api, name: str, times: dict[str, float]) -> None:
    """Note when a watch first shows the job Succeeded."""
    path = KINDS["pytorchjob"].resource.path(api.namespace)
    query = {"watch": "true", "fieldSelector": f"metadata.name={name}"}
    for line in api.lines(path, query, 120):
        if KINDS["pytorchjob"].state(json.loads(line)["object"]).phase == "succeeded":
            times["succeeded"] = time.time()
            return


def _sdk(api: Api, name: str, times: dict[str, float]) -> None:
    """Wait by the SDK, from the creation of the job."""
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
