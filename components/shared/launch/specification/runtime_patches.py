"""What a TrainJob has of ours in its runtime's pods, and whether it still has it."""

from kfp_ddp.components.shared.cluster.api import Object

MANAGER = "kfp-ddp/launcher"


def lost_patches(job: Object) -> str:
    """What is said of a TrainJob that has lost our patches; '' while it has them.

    Kueue before 0.17 writes back a TrainJob as Trainer 2.0 knew it, without runtimePatches, when
    it admits one; Trainer cannot make its pods after that.
    """
    patches = job["spec"].get("runtimePatches") or []
    if any(patch["manager"] == MANAGER for patch in patches):
        return ""
    return (
        "has lost its runtimePatches, with volumes and settings, and was deleted; Kueue before "
        "0.17 takes them away: use a newer one, or backend pytorchjob in this queue"
    )
