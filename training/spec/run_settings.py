"""Settings of how a run proceeds: its checkpoints, its end, its devices and its reports."""

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from kfp_ddp.core.secrets import reason
from kfp_ddp.core.settings import SettingsPart

_MLFLOW = re.compile("(https?|file|databricks)(://|$)")


class CheckpointSettings(SettingsPart):
    """When a run evaluates and saves, and what it resumes from."""

    eval_epochs: int = Field(1, ge=1)
    """Evaluate every this many epochs, and after the last one."""
    checkpoint_epochs: int = Field(1, ge=0)
    """Save a checkpoint every this many epochs, and after the last one; 0: only after the last."""
    checkpoint_minutes: float = Field(15.0, ge=0)
    """Also save a checkpoint every this many minutes; 0: never."""
    checkpoint_steps: int = Field(0, ge=0)
    """Also save a checkpoint every this many steps; 0: never."""
    keep_checkpoints: int = Field(2, ge=2)
    """How many of the newest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint with the highest validation accuracy, and of several that with the
    lowest loss; it, not the newest, is the result of the training."""
    resume: Literal["auto", "never"] = "auto"
    """Resume from the newest valid checkpoint, or start from scratch (never)."""
    run_id: str = ""
    """Name of this run: with resume=never a later attempt of the same run still resumes it; '' if
    each start is a separate run."""


class StopSettings(SettingsPart):
    """When a run ends before its last epoch."""

    early_stop_epochs: int = Field(0, ge=0)
    """Stop the training when the validation accuracy, and at the same accuracy the loss, has not
    improved for this many epochs; 0: never."""
    max_gpu_hours: float = Field(0.0, ge=0)
    """Evaluate, save a checkpoint and end the training when all its attempts have used so many
    GPU-hours, or on CPUs hours of its ranks; 0: no limit."""
    gpu_hour_price: float = Field(0.0, ge=0)
    """Price of a GPU-hour, for the costs in reports; prices of job has one for each kind of node;
    0: not known."""
    stop_epochs: int = Field(0, ge=0)
    """Save and stop after this many of the epochs, with the schedule of all; a start with more
    continues exactly; 0: after the last one."""
    stop_when_stale: str = ""
    """Heartbeat file: save and stop when it no longer changes; '' for none."""
    stale_seconds: float = Field(120.0, gt=0)
    """Seconds without a change of that file before the run stops."""


class DistributionSettings(SettingsPart):
    """How the ranks and their devices compute."""

    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the shuffling and the augmentation."""
    strategy: Literal["ddp", "single"] = "ddp"
    """A copy of the network on every rank (ddp), or a single rank."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Compute on GPUs (cuda), on an Apple GPU (mps, one rank only) or on CPUs; auto: on a GPU if
    there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Number format of autocast; auto: bf16 on a GPU that has it, fp16 with dynamic loss scaling on
    one with tensor cores for it alone, otherwise fp32."""
    decode: Literal["cpu", "gpu", "auto"] = "cpu"
    """Decode JPEG files of training in loader processes, or on the GPU (NVIDIA) except large ones;
    auto: in the way in which 20 steps took less time. Evaluation decodes on CPUs."""
    compile: bool = False
    """Compile the network with torch.compile."""
    deterministic: bool = False
    """Use deterministic algorithms only: the same bits in every run; others raise an error."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes that ranks wait for each other before the run fails."""


class ReportSettings(SettingsPart):
    """Where the figures of a run go."""

    log_steps: int = Field(50, ge=1)
    """Write metrics every this many steps."""
    tensorboard: bool = False
    """Also write TensorBoard events, to tensorboard/ in the output folder."""
    prometheus_port: int = Field(0, ge=0, le=65535)
    """Serve the metrics to Prometheus on this port of rank 0; 0: off."""
    mlflow_uri: str = ""
    """URI of an MLflow server that also gets settings and metrics, such as
    https://mlflow.example.com; '' for none. Do not put a login into it: use MLFLOW_TRACKING_TOKEN,
    or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, in the bucket's secret."""
    mlflow_experiment: str = Field("kfp-ddp", min_length=1)
    """MLflow experiment of the run; created if it does not exist."""
    profile_steps: int = Field(0, ge=0)
    """Profile this many steps of rank 0, to profile/ in the output folder; 0: none."""
    peak_tflops: float = Field(0.0, ge=0)
    """Peak TFLOP/s of one device, for its utilisation (MFU); 0: the known peak of the GPU."""

    @model_validator(mode="after")
    def _check_mlflow(self) -> Self:
        if reason(self.mlflow_uri):  # messages do not show it
            raise ValueError(
                "mlflow_uri has a login in it, which a run's settings would show: put "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD into the bucket's secret"
            )
        if self.mlflow_uri and not _MLFLOW.match(self.mlflow_uri):
            raise ValueError(
                f"mlflow_uri={self.mlflow_uri!r} is not a URI such as https://mlflow.example.com"
            )
        return self
