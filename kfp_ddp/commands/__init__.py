"""One module a command of `kfp-ddp`; `kfp_ddp.cli` imports a module when it is called."""
