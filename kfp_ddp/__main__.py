"""`python -m kfp_ddp`: the same as the program `kfp-ddp`."""

from kfp_ddp.cli import main

if __name__ == "__main__":
    main()
