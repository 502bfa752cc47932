"""Model bundles: content, signature, champion history, registry and serving."""
