"""The KFP component `register`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def register(destination: str, model_name: str, release: dict, version: str = "") -> str:
    """Register a published bundle and the champion in Kubeflow Model Registry or in MLflow.

    Args:
        destination: Where bundles are uploaded to, as for publish.
        model_name: Name of the model at the destination, and in the registry.
        release: Settings of the release by name; the README lists those of the registry.
        version: First twelve digits of the bundle's digest; empty for the champion.

    Returns:
        The registered version.
    """
    inputs = dict(locals())
    from kfp_ddp.models.registry import run

    return run(**inputs)
