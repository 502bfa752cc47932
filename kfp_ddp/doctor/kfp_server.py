"""Whether the KFP API server answers, and is of the SDK's version."""

import importlib.metadata
import json
import urllib.error
import urllib.request

from kfp_ddp.doctor.finding import Finding


def kfp_server(host: str) -> Finding:
    """The KFP API server's version against the SDK's; only where a host is given."""
    sdk = importlib.metadata.version("kfp")
    if not host:
        return Finding("warn", "KFP", f"SDK {sdk}; the API server was not asked", "give --host")
    if not host.startswith(("http://", "https://")):
        remedy = "give one as http://localhost:8888"
        return Finding("bad", "KFP", f"{host} is not an http(s) URL", remedy)
    url = f"{host.rstrip('/')}/apis/v2beta1/healthz"
    forward = "kubectl port-forward -n kubeflow svc/ml-pipeline 8888; --host http://localhost:8888"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
            server = str(json.load(answer)["tag_name"])
    except urllib.error.HTTPError as error:
        error.close()
        said = f"{url} answers {error.code} {error.reason}"
        return Finding("bad", "KFP", said, f"bypass the login: {forward}")
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Finding("bad", "KFP", f"{url} does not answer ({reason})", forward)
    except (ValueError, KeyError, TypeError):
        said = f"{url} is not answered by a KFP API server"
        return Finding("bad", "KFP", said, f"if it is a login page, bypass it: {forward}")
    if server.lstrip("v").split(".")[:2] == sdk.split(".")[:2]:
        return Finding("ok", "KFP", f"SDK {sdk}, API server {server}")
    said = f"SDK {sdk}, API server of {server} version"
    if server != "unknown":  # what a server says that was built without its tag
        said = f"SDK {sdk}, API server {server}"
    return Finding("warn", "KFP", said, "use an SDK of the server's minor version")
