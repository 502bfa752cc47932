"""The step that runs any PyTorchJob."""
