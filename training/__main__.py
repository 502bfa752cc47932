"""`python -m kfp_ddp.training`: one rank, alone or under torchrun."""

import sys

from kfp_ddp.training.train import main

if __name__ == "__main__":
    sys.exit(main())
