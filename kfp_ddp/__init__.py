"""Kubeflow Pipelines components for PyTorch DDP training: bucket to evaluated, exported model."""

__version__ = "0.1.0"
