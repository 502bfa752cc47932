"""What `kfp-ddp doctor` looks at."""
