"""Run a pipeline of kfp-ddp from a Python program, and wait for its end.

    kfp-ddp compile --registry registry.example.com/ml --output build/compiled
    python examples/client.py http://localhost:8888 gs://bucket/photos \
        build/compiled/train_resnet.yaml

Everything here is KFP's own client; `kfp-ddp run --wait` does the same, and checks the settings
before they are sent.
"""

import sys

import kfp


def main(host: str, source: str, package: str) -> int:
    """Start a run, wait for its end, and print its state; return 0 if it succeeded."""
    client = kfp.Client(host=host)
    started = client.create_run_from_pipeline_package(
        package,
        arguments={
            "source": source,
            "model": "resnet18",
            "epochs": 10,
            "training": {"image_size": 64},  # settings without a box of their own
            "gate": {"min_accuracy": 0.9},
        },
        run_name="photographs",
        experiment_name="photographs",
    )
    print("run", started.run_id, flush=True)
    ended = client.wait_for_run_completion(started.run_id, timeout=24 * 3600, sleep_duration=2)
    print("state", ended.state)
    for task in ended.run_details.task_details if ended.run_details else []:
        if task.state == "FAILED":
            print("failed", task.display_name)
    return 0 if ended.state == "SUCCEEDED" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
