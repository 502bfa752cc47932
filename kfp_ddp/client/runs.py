"""Runs of a KFP server: to find one by what a person types, and what is told of each."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kfp_ddp.client.pages import pages
from kfp_ddp.core.config import Connection
from kfp_ddp.core.errors import InputError, RefusedError

if TYPE_CHECKING:
    import kfp
    from kfp_server_api import V2beta1Run

LAST = "last"
PAGE = 100
LOOKED_AT = 1000
"""Runs that a name or a part of an id is looked for in, the newest first."""
SHOWN = 5
STATES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELING", "CANCELED", "PAUSED")
CAN_GO_ON = ("FAILED", "CANCELED")
NOT_YET = datetime(1970, 1, 2, tzinfo=UTC)
"""The server says 1970 for what has not come."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def find_run(client: "kfp.Client", word: str) -> "V2beta1Run":
    """The one run that a person means, with its details.

    Args:
        client: Of the server.
        word: The run's id or the first characters of it, its display name, or last.

    Raises:
        InputError: there is none, or more than one.
    """
    if UUID.fullmatch(word):
        return _get(client, word)
    if word == LAST:
        newest = next(newest_runs(client, 1), None)
        if newest is None:
            raise InputError(f"there is no run yet{_there(client)}; kfp-ddp run starts one")
        return _get(client, newest.run_id)
    if not word:
        raise InputError("the name of a run is empty: kfp-ddp runs lists them")
    runs = list(newest_runs(client, LOOKED_AT))
    found = [run for run in runs if run.display_name == word] or [
        run for run in runs if run.run_id.startswith(word)
    ]
    if not found:
        from kfp_ddp.core.settings import hint  # only an error needs it

        near = hint(word, [run.display_name for run in runs])
        looked = f" among the newest {LOOKED_AT}" if len(runs) >= LOOKED_AT else ""
        raise InputError(
            f"there is no run {word!r}{looked}{_there(client)}{near or '; kfp-ddp runs lists them'}"
        )
    if len(found) > 1:
        several = ", ".join(f"{run.run_id[:8]} of {_day(run)}" for run in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InputError(f"{word!r} is {len(found)} runs: {several}{more}; give one's id")
    return _get(client, found[0].run_id)


def newest_runs(
    client: "kfp.Client", most: int, experiment_id: str | None = None
) -> "Iterator[V2beta1Run]":
    """Runs, the newest first, without their details and specs: to find one by."""
    seen = 0

    def ask(token: str) -> "tuple[Sequence[Mapping[str, Any]], str]":
        answer = _page(client, token, min(PAGE, most - seen), experiment_id)
        return answer.get("runs", []), answer.get("next_page_token", "")

    for runs in pages(ask):
        yield from (_slim(client, run) for run in runs)
        seen += len(runs)
        if seen >= most:
            return


def _page(client: "kfp.Client", token: str, size: int, experiment_id: str | None) -> dict[str, Any]:
    """A page of the list, as JSON: kfp's objects of all nodes of a run take it 80 ms."""
    whose = {"experiment_id": experiment_id} if experiment_id else {"namespace": _namespace(client)}
    asked = {"page_token": token, "page_size": size, "sort_by": "created_at desc", **whose}
    answer = client._run_api.api_client.call_api(
        "/apis/v2beta1/runs",
        "GET",
        query_params=[(name, value) for name, value in asked.items() if value],
        header_params={"Accept": "application/json"},
        response_type="object",
        auth_settings=["Bearer"],
        _return_http_data_only=True,
    )
    return dict(answer)


def _slim(client: "kfp.Client", run: Mapping[str, Any]) -> "V2beta1Run":
    kept = {name: run[name] for name in run if name not in ("run_details", "pipeline_spec")}
    answer = SimpleNamespace(data=json.dumps(kept))
    return client._run_api.api_client.deserialize(answer, "V2beta1Run")


def _namespace(client: "kfp.Client") -> str:
    return client.get_user_namespace() or ""


def listed(
    client: "kfp.Client", most: int, experiment: str = "", state: str = ""
) -> list["V2beta1Run"]:
    """The newest runs.

    Args:
        client: Of the server.
        most: So many of them.
        experiment: Name of theirs; empty for any.
        state: Theirs; empty for any.

    Raises:
        InputError: there is no such experiment or state.
    """
    wanted = state.upper()
    if wanted and wanted not in STATES:
        raise InputError(f"state {state!r} is unknown: it is one of {', '.join(STATES).lower()}")
    found_in = None
    if experiment:
        try:
            found_in = client.get_experiment(experiment_name=experiment).experiment_id
        except RefusedError:
            raise
        except ValueError:  # kfp's, for a name that it does not find
            raise InputError(f"there is no experiment {experiment!r}{_there(client)}") from None
    runs = newest_runs(client, LOOKED_AT if wanted else most, found_in)
    return [run for run in runs if not wanted or run.state == wanted][:most]


def document(run: "V2beta1Run", connection: Connection) -> dict[str, Any]:
    """What `--json` prints of a run."""
    began, over = started(run), ended(run)
    return {
        "run_id": run.run_id,
        "name": run.display_name,
        "state": run.state or "PENDING",
        "began": began and began.isoformat(),
        "ended": over and over.isoformat(),
        "page": connection.run_page(run.run_id),
        "parameters": parameters_of(run),
    }


def spec_of(client: "kfp.Client", run: "V2beta1Run") -> Mapping[str, Any] | None:
    """The pipeline's spec that a run is of; None where it is gone with its version."""
    found = run.pipeline_spec
    reference = run.pipeline_version_reference
    if not isinstance(found, Mapping) and reference and reference.pipeline_version_id:
        try:
            version = client.get_pipeline_version(
                reference.pipeline_id, reference.pipeline_version_id
            )
        except RefusedError:
            return None
        found = version.pipeline_spec
    return found if isinstance(found, Mapping) else None


def parameters_of(run: "V2beta1Run") -> dict[str, Any]:
    """What a run was given."""
    return dict((run.runtime_config and run.runtime_config.parameters) or {})


def started(run: "V2beta1Run") -> datetime | None:
    """When it was created."""
    return known_time(run.created_at)


def ended(run: "V2beta1Run") -> datetime | None:
    """When it ended; None while it goes on."""
    return known_time(run.finished_at)


def known_time(moment: datetime | None) -> datetime | None:
    """A time that the server tells; None for what has not come."""
    return moment if moment is not None and moment > NOT_YET else None


def _get(client: "kfp.Client", run_id: str) -> "V2beta1Run":
    try:
        return client.get_run(run_id)
    except RefusedError as error:
        if error.status != 404:
            raise
        raise InputError(
            f"there is no run {run_id}{_there(client)}: it was deleted, or is another server's; "
            "kfp-ddp runs lists them"
        ) from None


def _there(client: "kfp.Client") -> str:
    namespace = _namespace(client)
    return f" in namespace {namespace}" if namespace else ""


def _day(run: "V2beta1Run") -> str:
    at = started(run)
    return f"{at:%d %b %H:%M}" if at else "no date"
