"""The KFP component `deploy`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.2.0", install_kfp_package=False)
def deploy(
    bundle: str,
    deploy_report: dsl.Output[dsl.Markdown],
    model_name: str = "model",
    release: dict = {},  # noqa: B006
    run_id: str = "",
) -> NamedTuple("Deployed", [("url", str), ("version", str)]):
    """Roll a bundle out on KServe: test it with its own sample, and roll it back if it fails.

    Args:
        bundle: URI of a published bundle, which KServe can read; empty to do nothing.
        deploy_report: The result.
        model_name: Name of the model in the bundle.
        release: Settings of the release by name, as in the README; nothing is done without service.
        run_id: ID of the run, recorded in the service, so that another run can take it over.

    Returns:
        URL of the service inside the cluster, empty if nothing was done, and the served version.
    """
    inputs = dict(locals())
    from kfp_ddp.rollout.engine import run

    return run(**inputs)
