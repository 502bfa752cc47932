"""A program run in a pod: what it is given goes in, what it writes comes out in blocks."""

import json
from collections.abc import Iterator

from kfp_ddp.core.errors import StorageError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Api, core

STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
QUIET_SECONDS = 120.0


def execute(api: Api, pod: str, command: list[str], given: str) -> Iterator[bytes]:
    """What the program writes to stdout, block by block.

    Args:
        api: The pod's namespace.
        pod: Its name.
        command: The program and its arguments.
        given: One line for its stdin.

    Raises:
        StorageError: the connection was refused or cut, or the program did not end with 0.
    """
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url
    from websocket import WebSocketException

    query = [("command", each) for each in command]
    query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
    headers: dict[str, str] = {}
    api.client.update_params_for_auth(headers, query, ["BearerToken"])
    configuration = api.client.configuration
    url = f"{configuration.host}{core(api.namespace, 'pods', pod)}/exec"
    try:
        socket = create_websocket(configuration, get_websocket_url(url, query), headers)
    except (WebSocketException, OSError) as error:
        raise StorageError(
            f"no program can be run in pod {pod}: {one_line(error)}; a right to pods/exec is needed"
        ) from None
    said = b""
    try:
        socket.settimeout(QUIET_SECONDS)
        socket.send_binary(bytes([STDIN]) + given.encode() + b"\n")
        while frame := socket.recv():
            channel, block = frame[0], frame[1:]
            if channel == STDOUT and block:
                yield block
            elif channel == STDERR:
                said = (said + block)[-4096:]
            elif channel == STATUS:
                _check(json.loads(block), said.decode(errors="replace"))
                return
    except (WebSocketException, OSError) as error:
        raise StorageError(
            f"the connection to pod {pod} was cut: {one_line(error)}; try again"
        ) from None
    finally:
        socket.close(timeout=1)
    raise StorageError(f"the connection to pod {pod} was closed early; try again")


def _check(status: dict[str, str], said: str) -> None:
    if status.get("status") != "Success":
        last = said.strip().splitlines()[-1:] or [status.get("message", "it failed")]
        raise StorageError(f"the run's files cannot be read: {one_line(last[0])}")
