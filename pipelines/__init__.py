"""Pipelines, one a file: only wiring. Each is compiled to `compiled/<file name>.yaml`."""

NAMES = ("train_resnet",)
