"""A stand-in for Kubeflow Model Registry: its contract, not the server."""
