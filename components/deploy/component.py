"""The KFP component `deploy`."""

from typing import NamedTuple

from kfp import dsl


@dsl.component(base_image="ghcr.io/kfp-ddp/launcher:0.1.0", install_kfp_package=False)
def deploy(
    bundle: str,
    deploy_report: dsl.Output[dsl.Markdown],
    model_name: str = "model",
    release: dict = {},  # noqa: B006
    run_id: str = "",
) -> NamedTuple("Deployed", [("url", str), ("version", str)]):
    """Roll a bundle out on KServe: tried with its own sample first, and taken back if it fails.

    Args:
        bundle: Address of a published bundle, which KServe can read; empty to do nothing.
        deploy_report: What was rolled out, and where it answers.
        model_name: Name of the model in the bundle.
        release: Settings of the release by name, those of the service among them; the README lists
            them. Without a service nothing is done.
        run_id: Of the run, which the service remembers: another run that deploys takes it over.

    Returns:
        url: Where the service answers inside the cluster; empty where nothing was done.
        version: The bundle's, which answers there.
    """
    inputs = dict(locals())
    from kfp_ddp.models.serving.engine import run

    return run(**inputs)
