"""What talks with a KFP server, through `kfp.Client`."""
