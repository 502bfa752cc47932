"""Kubeflow Pipelines components for PyTorch DDP training: bucket to evaluated, exported model."""

import os
import sys

__version__ = "0.2.0"

# ONNX Runtime, MLflow and OpenVINO would report each use to their makers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it cannot be imported
