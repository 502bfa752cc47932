"""One module a command of the `kfp-ddp` program; `kfp_ddp.cli` imports a module when it is called."""
