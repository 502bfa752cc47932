"""The KFP component `register`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def register(
    destination: str,
    model_name: str,
    release: dict,
    version: str = "",
) -> str:
    """Register a published bundle in Kubeflow Model Registry, and who is the champion.

    Args:
        destination: Where bundles are uploaded to, as publish was given it.
        model_name: Name of the model at the destination, and in the registry.
        release: Settings of the release by name, of which those of the registry count; the README
            lists them.
        version: The bundle at the destination, the first twelve digits of its digest; empty for
            what CHAMPION names.

    Returns:
        The version that is registered.
    """
    inputs = dict(locals())
    from kfp_ddp.models.registry import run

    return run(**inputs)
