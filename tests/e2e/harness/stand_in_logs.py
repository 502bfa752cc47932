"""The log server of the stand-in kubelet: what its pods wrote, over TLS, as a kubelet gives it."""

import base64
import contextlib
import ipaddress
import select
import ssl
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from kfp_ddp.k8s.api import Api

REQUESTS = "/apis/certificates.k8s.io/v1/certificatesigningrequests"


@dataclass
class Written:
    """What one pod wrote, each line with its time, and whether it is over."""

    lines: list[tuple[datetime, str]] = field(default_factory=list)
    over: bool = False


class Logs:
    """What all pods wrote, and how many streams of it are open."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.of: dict[str, Written] = {}
        self.asked: set[str] = set()
        """Pods whose log was asked for."""
        self.open = self.most_open = 0

    def write(self, pod: str, *lines: str, over: bool = False) -> None:
        """Let a pod write lines, and end."""
        now = datetime.now(UTC)
        with self.changed:
            written = self.of.setdefault(pod, Written())
            written.lines += [(now, line) for line in lines]
            written.over = written.over or over
            self.changed.notify_all()

    def forget(self, pod: str) -> None:
        """Drop what a pod of this name wrote: another one takes its place."""
        with self.changed:
            self.of.pop(pod, None)
            self.changed.notify_all()

    @contextmanager
    def reading(self, pod: str) -> Iterator[Written]:
        """Count one stream for the length of a `with` block."""
        with self.changed:
            self.asked.add(pod)
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            written = self.of.setdefault(pod, Written())
        try:
            yield written
        finally:
            with self.changed:
                self.open -= 1


class Handler(BaseHTTPRequestHandler):
    """GET /containerLogs/NAMESPACE/POD/CONTAINER, with the options that a kubelet takes."""

    logs: Logs

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        pod = address.path.split("/")[3]
        options = {name: values[0] for name, values in parse_qs(address.query).items()}
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with self.logs.reading(pod) as written, contextlib.suppress(OSError):
            self._write(written, options)

    def _write(self, written: Written, options: dict[str, str]) -> None:
        since = datetime.fromisoformat(options.get("sinceTime", "2000-01-01T00:00:00Z"))
        at = max(0, len(written.lines) - int(options.get("tailLines", 1_000_000)))
        while True:
            with self.logs.changed:
                fresh, over = written.lines[at:], written.over
                if not fresh and not over and options.get("follow") == "true":
                    if select.select([self.connection], [], [], 0)[0]:
                        return  # nobody listens any more
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
            if over or options.get("follow") != "true":
                return

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(api: Api, address: str, folder: Path) -> Iterator[tuple[Logs, int]]:
    """Serve logs at an address of a node while the block lasts; the port."""
    logs = Logs()
    handler = type("StandInLogs", (Handler,), {"logs": logs})
    server = ThreadingHTTPServer((address, 0), handler)
    server.daemon_threads = True
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(_certificate(api, address, folder))
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield logs, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def _certificate(api: Api, address: str, folder: Path) -> Path:
    """A kubelet's serving certificate, signed by the cluster; with its key in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, oid = ec.generate_private_key(ec.SECP256R1()), x509.NameOID
    named = [
        x509.NameAttribute(oid.ORGANIZATION_NAME, "system:nodes"),
        x509.NameAttribute(oid.COMMON_NAME, "system:node:stand-in"),
    ]
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    made = x509.CertificateSigningRequestBuilder(x509.Name(named)).add_extension(here, False)
    request = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    name = f"stand-in-{uuid.uuid4().hex[:8]}"
    spec = {
        "request": base64.b64encode(request).decode(),
        "signerName": "kubernetes.io/kubelet-serving",
        "usages": ["digital signature", "server auth"],
    }
    body = api.call("POST", REQUESTS, {"metadata": {"name": name}, "spec": spec})
    approved = {"type": "Approved", "status": "True", "reason": "StandIn", "message": "a test's"}
    body["status"] = {"conditions": [approved]}
    try:
        api.call("PUT", f"{REQUESTS}/{name}/approval", body)
        signed = ""
        while not signed:
            time.sleep(0.05)
            found = api.call("GET", f"{REQUESTS}/{name}")
            signed = (found.get("status") or {}).get("certificate", "")
    finally:
        api.delete(f"{REQUESTS}/{name}")
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = folder / "kubelet.pem"
    path.touch(mode=0o600)
    path.write_bytes(pem + base64.b64decode(signed))
    return path
