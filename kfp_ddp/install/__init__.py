"""What `kfp-ddp install` puts into a namespace, and how."""
