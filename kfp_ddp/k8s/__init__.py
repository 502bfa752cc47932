"""How a Kubernetes API server is asked and watched."""
