"""`python -m kfp_ddp`: the same as the program `kfp-ddp`."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which may be a downloaded dataset

from kfp_ddp.cli import main

if __name__ == "__main__":
    main()
