"""The private parts of kfp that this package uses, read at kfp 2.17.0 and kfp-server-api 2.17.3.

No other module reaches into kfp: check this one when kfp is upgraded.
"""

import json
import warnings
from collections.abc import Callable
from typing import Any

import kfp
import kfp_server_api
import urllib3
from kfp_server_api.rest import RESTClientObject

RestClient = Callable[[kfp_server_api.Configuration], RESTClientObject]


class Client(kfp.Client):  # type: ignore[misc]
    """kfp.Client that neither uses the home folder nor prints links to stdout."""

    def __init__(self, host: str, ca_file: str, rest_client: RestClient) -> None:
        """Connect and read the server's health.

        Args:
            host: URL of the API, without a slash at its end.
            rest_client: Makes what sends the requests.
        """
        self._ca_file = ca_file or None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # KFP 1 is not supported
            super().__init__(host=host, namespace="kubeflow")
        self.api: Any = self._run_api.api_client
        self.api.rest_client = rest_client(self._existing_config)
        self.run_service: Any = self._run_api
        self.pipeline_service: Any = self._pipelines_api
        self.upload_service: Any = self._upload_api
        self.schedule_service: Any = self._recurring_run_api
        health = self._healthz_api.healthz_service_get_healthz()
        self.multi_user: bool = bool(health.multi_user)
        body = json.loads(self.api.last_response.data)  # kfp-server-api has no field for this
        self.version = str(body.get("tag_name", ""))
        self.set_user_namespace("")
        self.new_experiment = ""

    def _load_config(self, host: str, *_: Any) -> kfp_server_api.Configuration:
        config = kfp_server_api.Configuration()
        config.host = host
        config.ssl_ca_cert = self._ca_file
        config.retries = urllib3.Retry(
            total=2, connect=2, read=1, redirect=False, status=0, other=0, backoff_factor=0.2
        )
        return config

    def _load_context_setting_or_default(self) -> None:
        # Without a namespace kfp sends a request here, before the login is set.
        self._context_setting = {"namespace": "not known yet"}

    def set_user_namespace(self, namespace: str) -> None:
        """Use this namespace from now on; kfp's own also writes it to the home folder."""
        self._context_setting["namespace"] = namespace

    def create_experiment(
        self, name: str, description: str | None = None, namespace: str | None = None
    ) -> Any:
        """Return the experiment of a name, created if missing; kfp's own prints a link.

        `new_experiment` is the name of one that was created.
        """
        namespace = namespace or self.get_user_namespace()
        try:
            return self.get_experiment(experiment_name=name, namespace=namespace)
        except ValueError as error:
            if not str(error).startswith("No experiment is found with name"):
                raise
        experiment = kfp_server_api.V2beta1Experiment(
            display_name=name, description=description, namespace=namespace
        )
        self.new_experiment = name
        return self._experiment_api.experiment_service_create_experiment(experiment=experiment)
