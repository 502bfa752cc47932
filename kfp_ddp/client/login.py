"""Who asks: a token, the cookie of a session, a user of Dex, or a client of IAP."""

import os
from dataclasses import dataclass
from pathlib import Path

from kfp_ddp.client.connection import secret_of
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError

IN_CLUSTER_TOKEN = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105


@dataclass(frozen=True)
class Login:
    """What goes with each request."""

    name: str
    """How a person would call it, in messages."""
    token: str = ""
    token_file: str = ""
    """Read for each request: who mounts it renews it."""
    cookie: str = ""

    def __bool__(self) -> bool:
        return bool(self.token or self.token_file or self.cookie)

    def headers(self) -> dict[str, str]:
        """What goes with the next request.

        Raises:
            InputError: the file cannot be read, or no header can hold what is in it.
        """
        if self.cookie:
            return {"Cookie": self._checked(self.cookie)}
        token = self.token or (secret_of("", self.token_file) if self.token_file else "")
        return {"Authorization": f"Bearer {self._checked(token)}"} if token else {}

    def _checked(self, secret: str) -> str:
        """The same, if it fits into a header: http's own error would show it."""
        if not (secret.isascii() and secret.isprintable()):
            raise InputError(
                f"{self.name} holds line ends or other than ASCII: give it in one line, as it was "
                "issued"
            )
        return secret


def find(connection: Connection, host: str) -> Login:
    """The login to use: what was set, else the token of the pod that this runs in, else none.

    Raises:
        InputError: what was set cannot be used.
    """
    if connection.token_file:
        secret_of("KFP_DDP_TOKEN", connection.token_file)
        return Login(f"the token in {connection.token_file}", token_file=connection.token_file)
    if token := os.environ.get("KFP_DDP_TOKEN", "").strip():
        return Login("the token of KFP_DDP_TOKEN", token=token)
    if cookie := secret_of("KFP_DDP_COOKIE", connection.cookie_file).strip():
        source = connection.cookie_file or "KFP_DDP_COOKIE"
        return Login(f"the cookie of {source}", cookie=cookie)
    if connection.username:
        from kfp_ddp.client import dex

        password = secret_of("KFP_DDP_PASSWORD", connection.password_file)
        if not password:
            raise InputError(
                f"there is no password for {connection.username}: set KFP_DDP_PASSWORD or "
                "--password-file"
            )
        cookie = dex.session(host, connection, password)
        return Login(f"Dex, as {connection.username}", cookie=cookie)
    if connection.iap_client_id:
        from kfp_ddp.client import iap

        return Login("Identity-Aware Proxy", token=iap.token(connection.iap_client_id))
    mounted = os.environ.get("KF_PIPELINES_SA_TOKEN_PATH") or IN_CLUSTER_TOKEN
    if Path(mounted).exists():
        return Login("the token of this pod's service account", token_file=mounted)
    return Login("no login")
