"""The exit handler that ends whatever a run left behind."""
