"""A run's folder where there is no claim: below a bucket's prefix, and here while a step works.

A step opens it by `opened`, a training works in what `carried` gives, and who follows its job looks
at `followed`. Each gives a folder of this machine; on a claim that is the folder itself.
"""

from kfp_ddp.components.shared.workspace.address import is_address, run_address
from kfp_ddp.components.shared.workspace.carried import carried
from kfp_ddp.components.shared.workspace.follow import followed
from kfp_ddp.components.shared.workspace.opened import Opened, opened, own_folder

__all__ = ["Opened", "carried", "followed", "is_address", "opened", "own_folder", "run_address"]
