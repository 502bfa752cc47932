"""Access to the Kubernetes API server: requests, watches, pods and nodes."""
