"""Watches and logs against a server that fails on demand, as a real one will not."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from itertools import chain, repeat
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from kfp_ddp.jobs.ending import Ending
from kfp_ddp.jobs.follow.decisions import Limits, out_of_time
from kfp_ddp.jobs.follow.follower import Follower
from kfp_ddp.jobs.follow.logs import PodLog
from kfp_ddp.jobs.follow.printer import Printer
from kfp_ddp.jobs.identity import identify
from kfp_ddp.jobs.jobs import REPORTED, Jobs
from kfp_ddp.jobs.kinds import KINDS
from kfp_ddp.jobs.launch_spec import LaunchSpec
from kfp_ddp.k8s import watch_cache
from kfp_ddp.k8s.api import PAGE, Api, ApiError, schedulable_nodes
from kfp_ddp.k8s.resource import CONFIG_MAPS
from kfp_ddp.k8s.watch_cache import WatchCache
from tests.cluster import ended, pod
from tests.serving import Handler, serving_by
from tests.waiting import until

Answer = Callable[["Server", dict[str, str]], None]


class Server(Handler):
    """Answers each GET with the next of `script`."""

    protocol_version = "HTTP/1.1"
    script: Iterator[Answer]
    lock = threading.Lock()
    ahead = 0.0
    """Seconds by which its clock is before ours."""

    def do_GET(self) -> None:
        query = {key: value[0] for key, value in parse_qs(urlsplit(self.path).query).items()}
        with self.lock:
            answer = next(type(self).script)
        answer(self, query)
        self.close_connection = True

    do_PATCH = do_GET

    def send(self, status: int, body: str) -> None:
        """A whole answer; without `close` the next request may meet the closing."""
        self.answer(status, body.encode(), Connection="close")

    def cut(self, body: str) -> None:
        """A streamed answer that ends without its end, as when a server dies."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        data = body.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + self.ahead, usegmt=True)


@contextmanager
def serving(script: Iterable[Answer], ahead: float = 0) -> Iterator[Api]:
    handler = type("Scripted", (Server,), {"script": iter(script), "ahead": ahead})
    with serving_by(handler) as url:
        configuration = client.Configuration(host=url)
        configuration.retries = False
        yield Api(client.ApiClient(configuration), "space")


def reply(status: int, body: str = "{}") -> Answer:
    return lambda server, query: server.send(status, body)


def item(uid: str, version: int) -> dict[str, object]:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def listing(version: int, *uids: str) -> Answer:
    result = {
        "metadata": {"resourceVersion": str(version)},
        "items": [item(uid, version) for uid in uids],
    }
    return reply(200, json.dumps(result))


def event(kind: str, uid: str, version: int) -> str:
    return json.dumps({"type": kind, "object": item(uid, version)}) + "\n"


def test_a_watch_cache_lives_through_cuts_expiry_and_errors() -> None:
    versions: list[str] = []

    def watch(body: str, whole: bool) -> Answer:
        def answer(server: Server, query: dict[str, str]) -> None:
            versions.append(query["resourceVersion"])
            (server.send(200, body) if whole else server.cut(body))

        return answer

    expired = json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}) + "\n"
    busy = '{"message": "etcd is away"}'

    script = [
        reply(503, busy),
        listing(5, "a"),
        watch(event("ADDED", "b", 6) + event("ADDED", "half", 7)[:20], whole=False),
        reply(500, busy),
        reply(200, "<html>a proxy is busy</html>\n"),
        reply(403, '{"message": "rights are not loaded yet"}'),
        watch(event("DELETED", "a", 8), whole=True),
        watch(expired, whole=True),
        listing(20, "b", "c"),
    ]
    with serving(chain(script, repeat(watch(event("MODIFIED", "c", 21), whole=True)))) as api:
        cache = WatchCache(api, CONFIG_MAPS, {}, threading.Event())
        cache.start()
        until(lambda: set(cache.objects) == {"b", "c"})
        cache.stop()
        cache.join(10)
    assert versions[:3] == ["5", "6", "8"]
    assert not cache.forbidden


def test_a_watch_cache_lists_pages_and_reduces_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, str]] = []
    monkeypatch.setattr(watch_cache, "REMOVED", 2)

    def page(uid: str, more: str) -> Answer:
        result = {
            "metadata": {"resourceVersion": "5", "continue": more},
            "items": [item(uid, 5) | {"spec": "long"}],
        }

        def answer(server: Server, query: dict[str, str]) -> None:
            requests.append(query)
            server.send(200, json.dumps(result))

        return answer

    gone = "".join(event("DELETED", uid, 6) for uid in ("a", "x", "y"))
    script = [page("a", "b"), page("b", ""), reply(200, gone + event("ADDED", "c", 7))]
    with serving(chain(script, repeat(reply(200, "")))) as api:
        changed = threading.Event()
        cache = WatchCache(api, CONFIG_MAPS, {}, changed, lambda of: {"metadata": of["metadata"]})
        cache.start()
        until(lambda: set(cache.objects) == {"b", "c"})
        cache.stop()
        cache.join(10)
    assert [entry.get("continue") for entry in requests] == [None, "b"]
    assert {entry["limit"] for entry in requests} == {str(PAGE)}
    assert cache.objects == {"b": {"metadata": item("b", 5)["metadata"]}, "c": item("c", 7)}
    assert set(cache.removed) == {"x", "y"}


def test_an_expired_list_of_nodes_is_read_again() -> None:
    def page(more: str, *nodes: str) -> Answer:
        specs: dict[str, dict[str, bool]] = {"drained": {"unschedulable": True}}
        specs |= {name: {} for name in nodes}
        items = [{"metadata": {"name": name}, "spec": spec} for name, spec in specs.items()]
        return reply(200, json.dumps({"metadata": {"continue": more}, "items": items}))

    too_old = reply(410, '{"message": "too old"}')
    script = [page("b", "gone-meanwhile"), too_old, page("b", "first"), page("", "second")]
    with serving(script) as api:
        assert [node["metadata"]["name"] for node in schedulable_nodes(api)] == ["first", "second"]


def test_a_watch_cache_gives_up_where_it_has_no_right() -> None:
    with serving(repeat(reply(403, '{"message": "no"}'))) as api:
        cache = WatchCache(api, CONFIG_MAPS, {}, threading.Event())
        cache.start()
        assert cache.synced.wait(20)
        cache.join(10)
    assert cache.forbidden == "no"


@pytest.mark.parametrize("cut_each", [37, 61, 113])
def test_a_log_survives_any_cut(cut_each: int, capsys: pytest.CaptureFixture[str]) -> None:
    # Ten lines a second, three of them at the very same time, with zeros that are not written.
    stamps = [f"2026-11-21T10:00:{n // 10:02}.{n // 3 % 4}Z" for n in range(40)]
    stamps.sort()
    whole = [f"{stamp} line {n}\n" for n, stamp in enumerate(stamps)]
    sent = 0

    def log(server: Server, query: dict[str, str]) -> None:
        nonlocal sent
        since = query.get("sinceTime", "")[:19]
        body = "".join(line for line in whole if line[:19] >= since)
        sent += cut_each
        if sent < 40 * cut_each and len(body) > cut_each:
            server.cut(body[: cut_each + sent // 4])
        else:
            server.send(200, body)

    over = pod("worker", ended(0), spec={"restartPolicy": "Never"}, phase="Succeeded")
    with serving(repeat(log)) as api:
        reader = PodLog(api, over, "pytorch", Printer(), "worker", False)
        reader.start()
        reader.join(30)
        assert not reader.is_alive()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"[worker] line {n}" for n in range(40)]


def test_a_request_is_repeated_while_the_server_has_a_bad_time() -> None:
    script = [
        reply(503),
        lambda server, query: server.cut("{"),
        reply(200, '{"good": true}'),
        reply(404, '{"message": "not there"}'),
        reply(200, "ok"),
        reply(404, '{"message": "not there"}'),
    ]
    with serving(script) as api:
        assert api.call("GET", "/x", retry=True) == {"good": True}
        with pytest.raises(ApiError, match="404 Not Found: not there"):
            api.call("GET", "/x", retry=True)


def test_a_job_is_marked_in_spite_of_server_errors(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the mark, a step that is run again would tell of the old failure once more."""
    marked: list[str] = []

    def take(server: Server, query: dict[str, str]) -> None:
        marked.append(server.command)
        server.send(200, "{}")

    spec = LaunchSpec.create(image="a:1", command=["true"])
    with serving([reply(503), reply(429), take]) as api:
        Jobs(api, spec, identify("run", "train", "", spec), None).mark(0, REPORTED)
    assert marked == ["PATCH"]
    assert capsys.readouterr().out == ""


def test_a_refusal_counts_only_from_a_server_that_has_started() -> None:
    """Until then it knows neither rights nor custom resources; /readyz says how far it is."""
    readyz = reply(500, "[-]poststarthook/rbac failed")
    script = [reply(403), readyz, reply(404), reply(403), reply(200, '{"good": true}')]
    with serving(script) as api:
        assert api.call("GET", "/x", retry=True) == {"good": True}


@pytest.mark.parametrize("ahead", [-3600.0, -600.0, 0.0, 600.0, 3600.0])
def test_a_deadline_counts_by_the_clock_that_dated_the_job(ahead: float) -> None:
    """A node whose clock is ten minutes off would end a job that was made just now."""
    kind, limits = KINDS["pytorchjob"], Limits(deadline=300, pending=300)
    with serving(repeat(reply(200)), ahead) as api:
        api.call("GET", "/x")
        created = datetime.fromtimestamp(time.time() + ahead - 100, UTC).isoformat()
        job = {"metadata": {"name": "x", "uid": "job", "creationTimestamp": created}}
        follower = Follower(api, kind, job, Ending(api, None), None)
        for watch in follower.watches.all:
            watch.synced.set()
        follower.watches.jobs.objects = {"job": job}
        look = follower._look()
        assert look is not None
        assert not out_of_time(look, limits, "")
        assert out_of_time(look, Limits(deadline=60), "")
        assert out_of_time(look, Limits(pending=60), "")
