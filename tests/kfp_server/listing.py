"""Pages of a list, as they were asked for: filtered, sorted, each with the token of the next."""

import base64
import json
from typing import Any

from tests.kfp_server.refusal import invalid

Row = dict[str, Any]
KEYS = {"id": None, "name": "name", "display_name": "display_name", "created_at": "created_at"}


def page(field: str, rows: list[Row], query: dict[str, str], what: str) -> Row:
    """The answer to a request for a list.

    Args:
        field: What the list is called in it.
        rows: All that the server has, oldest first.
        query: page_size, page_token, sort_by and filter.
        what: What failed where one cannot be used.
    """
    rows = _filtered(rows, query.get("filter", ""), what)
    key, _, order = query.get("sort_by", "").partition(" ")
    if key and (
        key not in {*KEYS, "state", "storage_state", "status"} or order not in ("", "asc", "desc")
    ):
        raise invalid(what, f"Invalid sorting field: {key}")
    if key and key != "id":
        rows = sorted(rows, key=lambda row: str(row.get(key, "")))
    if order == "desc":
        rows = rows[::-1]
    size = int(query.get("page_size") or 20)
    if size < 0:
        raise invalid(what, "The page size should be greater than 0")
    begin = _begin(query.get("page_token", ""), what)
    answer: Row = {field: rows[begin : begin + size], "total_size": len(rows)}
    if begin + size < len(rows):
        answer["next_page_token"] = base64.b64encode(
            json.dumps({"at": begin + size}).encode()
        ).decode()
    return {name: value for name, value in answer.items() if value}


def _begin(token: str, what: str) -> int:
    if not token:
        return 0
    try:
        return int(json.loads(base64.b64decode(token, validate=True))["at"])
    except (ValueError, KeyError, TypeError):
        raise invalid(what, "Invalid package token") from None


def _filtered(rows: list[Row], text: str, what: str) -> list[Row]:
    try:
        predicates = json.loads(text)["predicates"] if text else []
    except (ValueError, KeyError, TypeError):
        raise invalid(what, "failed to parse valid filter") from None
    for one in predicates:
        key, wanted = one["key"], one.get("string_value", one.get("stringValue", ""))
        match one["operation"]:
            case "EQUALS" | 1:
                rows = [row for row in rows if row.get(key, "") == wanted]
            case other:
                raise invalid(what, f"unknown operation {other}")
    return rows
