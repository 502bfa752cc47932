"""The log server of the stand-in kubelets: lines of pods over TLS, as from a kubelet."""

import base64
import contextlib
import ipaddress
import select
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from kfp_ddp.k8s.api import Api
from tests import serving
from tests.tls import private, server_context

REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"


@dataclass
class Log:
    """The log of one pod: lines with their times."""

    lines: list[tuple[datetime, str]] = field(default_factory=list)
    ended: bool = False


class Logs:
    """Logs of all pods, and the number of open streams."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.by_pod: dict[str, Log] = {}
        self.requested: set[str] = set()
        """Pods whose log was requested."""
        self.open = self.most_open = 0

    def write(self, pod: str, *lines: str, end: bool = False) -> None:
        """Let a pod write lines, and end."""
        now = datetime.now(UTC)
        with self.changed:
            log = self.by_pod.setdefault(pod, Log())
            log.lines += [(now, line) for line in lines]
            log.ended = log.ended or end
            self.changed.notify_all()

    def forget(self, pod: str) -> None:
        """Drop the log of a pod that is replaced by one of the same name."""
        with self.changed:
            self.by_pod.pop(pod, None)
            self.changed.notify_all()

    @contextmanager
    def reading(self, pod: str) -> Iterator[Log]:
        """Yield the log of a pod, and count a stream."""
        with self.changed:
            self.requested.add(pod)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            log = self.by_pod.setdefault(pod, Log())
        try:
            yield log
        finally:
            with self.changed:
                self.open -= 1


class Handler(serving.Handler):
    """GET /containerLogs/NAMESPACE/POD/CONTAINER, with the options that a kubelet takes."""

    logs: Logs

    def do_GET(self) -> None:  # noqa: N802  the name in http.server
        """Answer with the log."""
        address = urlsplit(self.path)
        pod = address.path.split("/")[3]
        options = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with self.logs.reading(pod) as log, contextlib.suppress(OSError):
            self._write(log, options)

    def _write(self, log: Log, options: dict[str, str]) -> None:
        since = datetime.fromisoformat(options.get("sinceTime", "2000-01-01T00:00:00Z"))
        at = max(0, len(log.lines) - int(options.get("tailLines", 1_000_000)))
        while True:
            with self.logs.changed:
                fresh, ended = log.lines[at:], log.ended
                if not fresh and not ended and options.get("follow") == "true":
                    if select.select([self.connection], [], [], 0)[0]:
                        return  # the client closed the connection
                    self.logs.changed.wait(1)
                    continue
            at += len(fresh)
            stamped = [
                f"{stamp.isoformat(timespec='microseconds')[:-6]}Z {text}\n"
                for stamp, text in fresh
                if stamp >= since
            ]
            self.wfile.write("".join(stamped).encode())
            self.wfile.flush()
            if ended or options.get("follow") != "true":
                return


@contextmanager
def serve_logs(api: Api, address: str, folder: Path) -> Iterator[tuple[Logs, int]]:
    """Yield logs, and the port at which they are served."""
    logs = Logs()
    handler = type("KubeletLogs", (Handler,), {"logs": logs})
    server = ThreadingHTTPServer((address, 0), handler)
    server.daemon_threads = True
    context = server_context(_certificate(api, address, folder))
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    with serving.serving(server):
        yield logs, server.server_port


def _certificate(api: Api, address: str, folder: Path) -> Path:
    """Return a file with a key and a serving certificate for kubelets from the cluster."""
    key, oid = ec.generate_private_key(ec.SECP256R1()), x509.NameOID
    names = [
        x509.NameAttribute(oid.ORGANIZATION_NAME, "system:nodes"),
        x509.NameAttribute(oid.COMMON_NAME, "system:node:stand-in"),
    ]
    builder = x509.CertificateSigningRequestBuilder(x509.Name(names))
    addresses = [x509.IPAddress(ipaddress.ip_address(address))]
    builder = builder.add_extension(x509.SubjectAlternativeName(addresses), False)
    request = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    name = f"stand-in-{uuid.uuid4().hex[:8]}"
    spec = {
        "request": base64.b64encode(request).decode(),
        "signerName": "kubernetes.io/kubelet-serving",
        "usages": ["digital signature", "server auth"],
    }
    body = api.call("POST", REQUESTS, {"metadata": {"name": name}, "spec": spec})
    approved = {"type": "Approved", "status": "True", "reason": "StandIn", "message": "a test"}
    body["status"] = {"conditions": [approved]}
    try:
        api.call("PUT", f"{REQUESTS}/{name}/approval", body)
        signed = ""
        while not signed:
            time.sleep(0.05)
            answer = api.call("GET", f"{REQUESTS}/{name}")
            signed = (answer.get("status") or {}).get("certificate", "")
    finally:
        api.call("DELETE", f"{REQUESTS}/{name}", retry=True)
    path = folder / "kubelet.pem"
    path.touch(mode=0o600)
    path.write_bytes(private(key) + base64.b64decode(signed))
    return path
