"""One connection: small responses arrive in the event loop, the rest of a big one in a thread."""

import asyncio
import io
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Self

from kfp_ddp.core.errors import InputError
from kfp_ddp.storage import event_loop
from kfp_ddp.storage.http.answer import HttpError, MinimumRate, Response
from kfp_ddp.storage.http.origin import Origin, tls

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_CONNECT = 30.0
"""Maximum seconds to connect, many at once on a slow machine."""
_CHECKS = 4
_RECEIVE = 120 << 10  # glibc maps memory anew for what is above 128 KiB
_GATHER = 1 << 20
_RECORDS = 1 << 16
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_Address = tuple[int, int, int, str, Any]
_BELIEVED = 1.0
_addresses: dict[tuple[str, int], tuple[float, Sequence[_Address]]] = {}
"""Until when, and what, was found for a host: a lookup takes a thread."""
_MAX_HOSTS = 64
_sessions: dict[tuple[ssl.SSLContext, Origin], ssl.SSLSession] = {}
"""TLS sessions: to resume one takes a third of the processor time."""


class HttpConnection:
    """A connection to one server; asyncio's transports would copy every byte of TLS twice more."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._unsent = b""
        self._answer: Response | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: OSError | None = None
        self._silence = 0
        self._pace = MinimumRate(timeout)
        self._timer: asyncio.TimerHandle | None = None
        self._server: tuple[ssl.SSLContext, Origin] | None = None  # to store its session

    @classmethod
    async def open(cls, origin: Origin, timeout: float) -> Self:
        """Connect, through the proxy of the environment if any; raise OSError, InputError."""
        connection = cls(timeout)
        limit = min(timeout, _CONNECT)
        try:
            async with asyncio.timeout(limit):
                await connection._connect(origin)
        except TimeoutError as error:
            connection.close()
            raise TimeoutError(f"no connection in {limit:g} s") from error
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(f"{error.strerror}: connection refused") from error
        except BaseException:
            connection.close()
            raise
        return connection

    @property
    def idle(self) -> bool:
        """Whether a request can be sent."""
        answer = self._answer
        return self._socket is not None and (
            answer is None or (answer.complete and answer.keeps and not self._unsent)
        )

    def send(self, request: bytes, limit: int, bodiless: bool = False) -> None:
        """Send a request on an idle connection; `answer` returns the response. See `Response`."""
        self._answer = Response(limit, bodiless)
        self._unsent = request
        self._pace.restart()
        self._write()
        if self._unsent and self._socket is not None:
            self._loop.add_writer(self._socket.fileno(), self._write_rest)

    async def answer(self) -> Response:
        """Return the response, complete unless it is `big`; raise OSError."""
        answer = self._answer
        assert answer is not None
        if not answer.complete and not answer.big and self._socket is not None:
            self._waiter = self._loop.create_future()
            self._silence = 0
            if self._timer is None:
                self._timer = self._loop.call_later(self._timeout / _CHECKS, self._check)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None and not answer.complete:
            raise self._error
        if self._server is not None:
            self._keep_session(self._server)
        return answer

    async def rest(self, take: Callable[[bytes], None], threads: Executor | None) -> None:
        """Pass the body of a big response to `take`, in a thread; raise OSError."""
        sock = self._socket
        answer = self._answer
        assert sock is not None
        assert answer is not None

        def interrupt() -> None:
            sock.shutdown(socket.SHUT_RDWR)

        await event_loop.in_thread(threads, self._receive, sock, answer, take, interrupt=interrupt)
        if answer.keeps:
            self._loop.add_reader(sock.fileno(), self._read)
        else:
            self.close()

    def close(self) -> None:
        """Close the connection; `answer` raises."""
        self._fail(ConnectionAbortedError("closed"))

    async def _connect(self, origin: Origin) -> None:
        host, port, request = origin.tunnel() if origin.proxy else (origin.host, origin.port, b"")
        await self._dial(host, port)
        assert self._socket is not None
        self._loop.add_reader(self._socket.fileno(), self._read)
        if request:
            self.send(request, 0, bodiless=True)
            status = (await self.answer()).status
            if status == 407:
                raise InputError(
                    f"proxy {host}:{port} refuses us (HTTP 407); give it a user and a password "
                    "that it knows, as http://user:password@host:port"
                )
            if status // 100 != 2:
                raise HttpError(f"proxy {host}:{port} answers HTTP {status}")
        if origin.secure:
            await self._secure(origin)

    async def _dial(self, host: str, port: int) -> None:
        """Connect to the first address of the host that responds in its share of the time."""
        problem = OSError(f"{host} has no address")
        addresses = await _resolve(host, port)
        share = min(self._timeout, _CONNECT) / max(1, len(addresses))
        for family, kind, protocol, _, address in addresses:
            self._socket = sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(share):
                    await self._loop.sock_connect(sock, address)
            except OSError as error:
                problem = error
                sock.close()
                self._socket = None
            else:
                return
        raise problem

    async def _secure(self, origin: Origin) -> None:
        assert self._socket is not None
        server = tls(origin.authorities), origin
        sock = server[0].wrap_socket(
            self._socket,
            server_hostname=origin.host,
            do_handshake_on_connect=False,
            session=_sessions.get(server),
        )
        self._socket = sock
        ready = asyncio.Event()
        self._loop.add_reader(sock.fileno(), ready.set)
        while True:
            try:
                sock.do_handshake()
                break
            except ssl.SSLWantReadError:  # a hello of ours always fits into the socket
                ready.clear()
                await ready.wait()
        self._loop.add_reader(sock.fileno(), self._read)
        self._server = None if sock.session_reused else server

    def _keep_session(self, server: tuple[ssl.SSLContext, Origin]) -> None:
        """Store the session for the next connection; TLS 1.3 has it after the first response."""
        sock = self._socket
        self._server = None
        if isinstance(sock, ssl.SSLSocket) and sock.session is not None:
            if len(_sessions) >= _MAX_HOSTS:
                _sessions.clear()
            _sessions[server] = sock.session

    def _write(self) -> None:
        assert self._socket is not None
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except _LATER:
            pass
        except OSError as error:
            self._fail(error)

    def _write_rest(self) -> None:
        self._write()
        if not self._unsent and self._socket is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _read(self) -> None:
        answer = self._answer
        sock = self._socket
        assert sock is not None
        try:
            while True:
                data = sock.recv(_RECEIVE)
                if answer is None or answer.complete:  # no request was sent
                    self.close()
                    return
                self._silence = 0
                self._pace.bytes += len(data)
                if data:
                    answer.feed(data)
                else:
                    answer.finish()
                if answer.complete or answer.big:
                    break
                if not isinstance(sock, ssl.SSLSocket):  # TLS comes in records of 16 KiB
                    return
        except _LATER:
            return
        except OSError as error:
            self._fail(error)
            return
        if answer.big:
            self._loop.remove_reader(sock.fileno())
        elif not data or not answer.keeps:
            self.close()
        self._wake()

    def _receive(
        self, sock: socket.socket, answer: Response, take: Callable[[bytes], None]
    ) -> None:
        pace = MinimumRate(self._timeout)
        receive = _receive_tls if isinstance(sock, ssl.SSLSocket) else _receive_plain
        more = receive(sock, self._timeout, pace)
        for block in answer.take():
            take(block)
        while not answer.complete:
            if data := more(min(answer.left, _GATHER)):
                answer.feed(data)
            else:
                answer.finish()
            for block in answer.take():
                take(block)
        sock.setblocking(False)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check(self) -> None:
        """Fail the response if the server has been silent, or slow, for too long."""
        self._timer = None
        if self._waiter is None:
            return
        self._silence += 1
        try:
            if self._silence > _CHECKS:
                raise TimeoutError("timed out")
            self._pace.waited(self._timeout / _CHECKS)
        except TimeoutError as error:
            self._fail(error)
        else:
            self._timer = self._loop.call_later(self._timeout / _CHECKS, self._check)

    def _fail(self, error: OSError) -> None:
        self._error = self._error or error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._socket is not None:
            sock = self._socket
            self._socket = None
            self._loop.remove_reader(sock.fileno())
            self._loop.remove_writer(sock.fileno())
            sock.close()
        self._wake()


async def _resolve(host: str, port: int) -> Sequence[_Address]:
    """Return the addresses of a host, looked up once for connections that are opened together."""
    now = time.monotonic()
    until, addresses = _addresses.get((host, port), (0.0, []))
    if now > until:
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        if len(_addresses) >= _MAX_HOSTS:
            _addresses.clear()
        _addresses[host, port] = now + _BELIEVED, addresses
    return addresses


def _receive_plain(
    sock: socket.socket, timeout: float, pace: MinimumRate
) -> Callable[[int], bytes]:
    """Return a function that receives a number of bytes in one call, 0 for any number."""
    limit = struct.pack("ll", *divmod(int(timeout * 1e6), 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setblocking(True)

    def more(wanted: int) -> bytes:
        began = time.perf_counter()
        try:
            data = sock.recv(wanted, socket.MSG_WAITALL) if wanted > 0 else sock.recv(_GATHER)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        pace.bytes += len(data)
        pace.waited(time.perf_counter() - began)
        return data

    return more


def _receive_tls(sock: socket.socket, timeout: float, pace: MinimumRate) -> Callable[[int], bytes]:
    """Return the same for TLS, from records of 16 KiB without another copy."""
    sock.settimeout(timeout)
    records = _Records(sock, timeout / _CHECKS, pace)
    file = io.BufferedReader(records, _RECORDS)

    def more(wanted: int) -> bytes:
        records.began = time.perf_counter()
        data = file.read(wanted) if wanted > 0 else file.read1(_GATHER)
        records.waited()
        return data

    return more


class _Records(io.RawIOBase):
    """A TLS socket as a file that checks the pace every `period` seconds."""

    def __init__(self, sock: socket.socket, period: float, pace: MinimumRate) -> None:
        self._sock = sock
        self._period = period
        self._pace = pace
        self.began = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        count = self._sock.recv_into(buffer)
        self._pace.bytes += count
        if time.perf_counter() - self.began > self._period:
            self.waited()
        return count

    def waited(self) -> None:
        now = time.perf_counter()
        self._pace.waited(now - self.began)
        self.began = now
