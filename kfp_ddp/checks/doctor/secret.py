"""The secret with a bucket's credentials: optional, but whole where it is there."""

import base64
import binascii
import json

from kfp_ddp.checks.doctor.finding import ASK_ADMIN, Asked, Finding
from kfp_ddp.k8s.api import Api, ApiError, Object, core

GOOGLE, WEB = "key.json", "netrc"
AMAZON = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AZURE = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_CONNECTION_STRING")
FACE = "HF_TOKEN"


def secret(api: Api, asked: Asked) -> Finding:
    """Whether the steps find credentials in it; without one they use those of their account."""
    name = asked.bucket_secret
    what = f"secret {name}"
    make = f"kubectl create secret generic -n {api.namespace} {name} --from-file={GOOGLE}"
    try:
        found = api.call("GET", core(api.namespace, "secrets", name))
    except ApiError as error:
        if error.status != 404:
            return Finding("warn", what, "may not be read", ASK_ADMIN)
        if name != Asked.bucket_secret:
            return Finding("bad", what, "does not exist", make)
        said = "does not exist: buckets are reached by what the steps' account may, or not at all"
        return Finding("warn", what, said, f"if that is not enough, {make}")
    data: Object = found.get("data") or {}
    trouble = _trouble(data)
    if not trouble:
        return Finding("ok", what, f"has {', '.join(sorted(data))}")
    return Finding("bad", what, trouble, f"kubectl delete secret -n {api.namespace} {name}; {make}")


def _trouble(data: Object) -> str:
    """What is wrong with the values of a secret, which are base64; '' for nothing."""
    given = [key for key in AMAZON if data.get(key)]
    if not given and not any(key in data for key in (GOOGLE, WEB, FACE, *AZURE)):
        known = f"neither {GOOGLE} nor {AMAZON[0]} nor {AZURE[0]}"
        return f"has {', '.join(sorted(data)) or 'nothing'}, and {known}"
    if len(given) == 1:
        (missing,) = set(AMAZON) - set(given)
        return f"has {given[0]} without {missing}"
    if GOOGLE not in data:
        return ""
    try:
        key = json.loads(base64.b64decode(data[GOOGLE]))
    except (ValueError, binascii.Error):
        return f"its {GOOGLE} is not JSON"
    if not isinstance(key, dict) or "type" not in key:
        return f"its {GOOGLE} is no key of a service account: it has no type"
    lacking = sorted({"client_email", "private_key"} - key.keys())
    if key["type"] == "service_account" and lacking:
        return f"its {GOOGLE} lacks {' and '.join(lacking)}"
    return ""
