"""A run's folder where there is no claim: below a bucket's prefix, and here while a step works.

A step opens it by `opened`, a training works in what `carried` gives, and who follows its job looks
at `followed`. Each gives a folder of this machine; on a claim that is the folder itself.
"""

from kfp_ddp.runs.workspace.address import run_address
from kfp_ddp.runs.workspace.carried import carried
from kfp_ddp.runs.workspace.follow import followed
from kfp_ddp.runs.workspace.opened import Opened, opened, own_folder

__all__ = ["Opened", "carried", "followed", "opened", "own_folder", "run_address"]
