"""The DDP training loop; it knows nothing of KFP, Kubernetes or buckets."""
