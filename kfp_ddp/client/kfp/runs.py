"""Runs on a KFP server: find them by what a user types, and list them."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from kfp_ddp.core.errors import InputError, RefusedError, ServerError

if TYPE_CHECKING:
    from kfp_server_api import V2beta1Run

    from kfp_ddp.client.kfp.compat import Client

T = TypeVar("T")
LAST = "last"
RUNS = "kfp-ddp runs lists them"
PAGE = 100
SEARCHED = 1000
"""Number of newest runs that are searched for a name or the start of an id."""
SHOWN = 5
STATES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELING", "CANCELED", "PAUSED")
RETRYABLE = ("FAILED", "CANCELED")
NEVER = datetime(1970, 1, 2, tzinfo=UTC)
"""The server writes 1970 for a time that is not set."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def pages(read: Callable[[str], tuple[Sequence[T] | None, str | None]]) -> Iterator[Sequence[T]]:
    """Yield the pages of a list of the API; raise ServerError if a token repeats.

    `read` returns the page of a token, '' for the first, and the token of the next one.
    """
    token = ""
    done: set[str] = set()
    while True:
        page, following = read(token)
        yield page or ()
        done.add(token)
        token = following or ""
        if not token:
            return
        if token in done:
            raise ServerError("KFP's list leads back to a page that was read before; try again")


def find_run(client: "Client", word: str) -> "V2beta1Run":
    """Return the run of an id or its start, a name, or last; InputError for none or several."""
    if UUID.fullmatch(word):
        return _get(client, word)
    if word == LAST:
        newest = next(newest_runs(client, 1), None)
        if newest is None:
            raise InputError(f"there is no run yet{_where(client)}; kfp-ddp run starts one")
        return _get(client, newest.run_id)
    if not word:
        raise InputError(f"the name of a run is empty: {RUNS}")
    runs = list(newest_runs(client, SEARCHED))
    limit = f" among the newest {SEARCHED}" if len(runs) >= SEARCHED else ""
    matches = matching(runs, word, "run_id", f"run {word!r}{limit}{_where(client)}", RUNS)
    if len(matches) > 1:
        several = ", ".join(_word(run) for run in matches[:SHOWN])
        rest = len(matches) - SHOWN
        if rest > 0:
            several += f" and {rest} more"
        raise InputError(f"{word!r} matches {len(matches)} runs: {several}; give one's id")
    return _get(client, matches[0].run_id)


def _word(run: "V2beta1Run") -> str:
    """Return a run by the start of its id, and the time of its start."""
    identity = run.run_id[:8]
    created = known_time(run.created_at)
    return f"{identity} of {created:%d %b %H:%M}" if created else identity


def get(read: Callable[[str], Any], identity: str, what: str, listing: str) -> Any:
    """Return the run or schedule of an id; InputError, with the command that lists, for none."""
    try:
        return read(identity)
    except RefusedError as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        raise InputError(
            f"there is no {what}: it was deleted, or is on another server; {listing}"
        ) from None


def matching(rows: Sequence[Any], word: str, key: str, what: str, listing: str) -> list[Any]:
    """Return those of a name, else those whose id (`key`) starts so; InputError for none."""
    matches = [row for row in rows if row.display_name == word]
    if word and not matches:
        matches = [row for row in rows if getattr(row, key).startswith(word)]
    if not matches:
        from kfp_ddp.core.settings import hint  # only an error needs it

        near = hint(word, [row.display_name for row in rows]) or f"; {listing}"
        raise InputError(f"there is no {what}{near}")
    return matches


def newest_runs(
    client: "Client", most: int, experiment_id: str | None = None
) -> "Iterator[V2beta1Run]":
    """Yield runs, the newest first, without their details and specs."""
    count = 0

    def read(token: str) -> "tuple[Sequence[Mapping[str, Any]], str]":
        answer = _page(client, token, min(PAGE, most - count), experiment_id)
        return answer.get("runs", []), answer.get("next_page_token", "")

    for runs in pages(read):
        for run in runs:
            slim = dict(run)
            slim.pop("run_details", None)
            slim.pop("pipeline_spec", None)
            answer = SimpleNamespace(data=json.dumps(slim))  # the type that kfp reads
            yield client.api.deserialize(answer, "V2beta1Run")
        count += len(runs)
        if count >= most:
            return


def list_runs(
    client: "Client", most: int, experiment: str = "", state: str = ""
) -> "list[V2beta1Run]":
    """Return the newest runs; raise InputError for an unknown experiment or state."""
    state = state.upper()
    if state and state not in STATES:
        raise InputError(
            f"state {state.lower()!r} is unknown: it is one of {', '.join(STATES).lower()}"
        )
    experiment_id = _experiment_id(client, experiment) if experiment else None
    if not state:
        return list(newest_runs(client, most, experiment_id))[:most]
    # The server has no filter for the state that is shown.
    runs = newest_runs(client, SEARCHED, experiment_id)
    return [run for run in runs if shown_state(run) == state][:most]


def _experiment_id(client: "Client", name: str) -> str:
    """Return the id of an experiment; raise InputError if there is none of this name."""
    try:
        return str(client.get_experiment(experiment_name=name).experiment_id)
    except RefusedError:
        raise
    except ValueError:  # kfp's, for an unknown name
        raise InputError(f"there is no experiment {name!r}{_where(client)}") from None


def spec_of(client: "Client", run: "V2beta1Run") -> Mapping[str, Any] | None:
    """Return the pipeline's spec of a run; None if its version was deleted."""
    spec = run.pipeline_spec
    if isinstance(spec, Mapping):
        return spec
    reference = run.pipeline_version_reference
    if not reference or not reference.pipeline_version_id:
        return None
    try:
        version = client.get_pipeline_version(reference.pipeline_id, reference.pipeline_version_id)
    except RefusedError:
        return None
    spec = version.pipeline_spec
    return spec if isinstance(spec, Mapping) else None


def parameters_of(run: "V2beta1Run") -> dict[str, Any]:
    """Return the arguments of a run."""
    config = run.runtime_config
    parameters = config.parameters if config else None
    return dict(parameters or {})


def cancelled_at(run: "V2beta1Run") -> datetime | None:
    """Return when a user cancelled a run, which KFP then calls FAILED; None if nobody did."""
    history = run.state_history or []
    last = history[-2:]  # the very last one may already be FAILED
    times = [entry.update_time for entry in last if entry.state == "CANCELING"]
    return times[0] if times else None


def shown_state(run: "V2beta1Run") -> str:
    """Return the state of a run for people."""
    state = run.state or "PENDING"
    if state == "FAILED" and cancelled_at(run):
        return "CANCELED"
    return state


def known_time(moment: datetime | None) -> datetime | None:
    """Return a time of the server's; None if it is not set."""
    if moment is None or moment <= NEVER:
        return None
    return moment


def _page(client: "Client", token: str, size: int, experiment_id: str | None) -> dict[str, Any]:
    """Read a page of the list as JSON; kfp's objects of all nodes of a run take 80 ms each."""
    namespace = None if experiment_id else client.get_user_namespace()
    query = {
        "page_token": token,
        "page_size": size,
        "sort_by": "created_at desc",
        "experiment_id": experiment_id,
        "namespace": namespace,
    }
    answer = client.api.call_api(
        "/apis/v2beta1/runs",
        "GET",
        query_params=[(name, value) for name, value in query.items() if value],
        header_params={"Accept": "application/json"},
        response_type="object",
        auth_settings=["Bearer"],
        _return_http_data_only=True,
    )
    return dict(answer)


def _get(client: "Client", run_id: str) -> "V2beta1Run":
    return get(client.get_run, run_id, f"run {run_id}{_where(client)}", RUNS)


def _where(client: "Client") -> str:
    namespace = client.get_user_namespace()
    return f" in namespace {namespace}" if namespace else ""
