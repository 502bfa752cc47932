"""A token for Google's Identity-Aware Proxy, of the service account or the user that is set up."""

import os
import warnings

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.text import one_line

SETUP = "https://cloud.google.com/iap/docs/authentication-howto"


def token(client_id: str) -> str:
    """An ID token for this client.

    Raises:
        InputError: Google knows no account here.
    """
    from google.auth import exceptions
    from kfp.client import auth

    other = os.environ.get("KF_PIPELINES_APP_OAUTH2_CLIENT_ID")
    secret = os.environ.get("KF_PIPELINES_APP_OAUTH2_CLIENT_SECRET")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, _ = auth.get_auth_token(client_id, other, secret)
    except exceptions.GoogleAuthError as error:
        said = one_line(error.args[0] if error.args else error)
        raise InputError(f"no token for Identity-Aware Proxy: {said}") from None
    if not found:
        raise InputError(
            "no token for Identity-Aware Proxy: a user's own credentials do not do; set "
            "GOOGLE_APPLICATION_CREDENTIALS to a service account's key, or both of "
            f"KF_PIPELINES_APP_OAUTH2_CLIENT_ID and _SECRET ({SETUP})"
        )
    return str(found)
