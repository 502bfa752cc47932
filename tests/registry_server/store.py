"""A registry in memory; each operation is a method with its name in the contract."""

import itertools
import time
from typing import Any

Row = dict[str, Any]
_FIXED = {"id", "name", "createTimeSinceEpoch", "registeredModelId", "artifactType"}


class RefusedError(Exception):
    """A refused request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Store:
    """Models, their versions, and the artifacts of these."""

    def __init__(self) -> None:
        self.models: list[Row] = []
        self.versions: list[Row] = []
        self.artifacts: list[Row] = []
        self._of: dict[str, str] = {}
        self._ids = itertools.count(1)

    def get_registered_models(self, query: Row) -> Row:
        return page(self.models, query)

    def find_registered_model(self, query: Row) -> Row:
        return one("registered model", self.models, name=query["name"])

    def create_registered_model(self, query: Row, body: Row) -> Row:
        return self._new("registered model", self.models, body)

    def update_registered_model(self, query: Row, body: Row, registered_model_id: str) -> Row:
        return change(one("registered model", self.models, id=registered_model_id), body)

    def get_registered_model_versions(self, query: Row, registered_model_id: str) -> Row:
        rows = [row for row in self.versions if row["registeredModelId"] == registered_model_id]
        return page(rows, query)

    def find_model_version(self, query: Row) -> Row:
        keys = {"name": query["name"], "registeredModelId": query["parentResourceId"]}
        return one("model version", self.versions, **keys)

    def create_model_version(self, query: Row, body: Row) -> Row:
        one("registered model", self.models, id=body["registeredModelId"])
        return self._new("model version", self.versions, body, "registeredModelId")

    def update_model_version(self, query: Row, body: Row, model_version_id: str) -> Row:
        return change(one("model version", self.versions, id=model_version_id), body)

    def find_model_artifact(self, query: Row) -> Row:
        parent, name = query["parentResourceId"], query["name"]
        return one("model artifact", self._artifacts(parent), name=name)

    def upsert_model_version_artifact(self, query: Row, body: Row, model_version_id: str) -> Row:
        one("model version", self.versions, id=model_version_id)
        if "id" in body:
            return change(one("model artifact", self.artifacts, id=body["id"]), body)
        if any(row["name"] == body["name"] for row in self._artifacts(model_version_id)):
            raise RefusedError(
                409, f"model artifact with name {body['name']} already exists: conflict"
            )
        row = self._new("model artifact", self.artifacts, body, "id")
        self._of[row["id"]] = model_version_id
        return row

    def update_model_artifact(self, query: Row, body: Row, model_artifact_id: str) -> Row:
        return change(one("model artifact", self.artifacts, id=model_artifact_id), body)

    def _artifacts(self, version: str) -> list[Row]:
        return [row for row in self.artifacts if self._of.get(row["id"]) == version]

    def _new(self, kind: str, rows: list[Row], body: Row, *unique: str) -> Row:
        """Add a row; its name must be unique among rows with the same values of `unique`."""
        for other in rows:
            if all(other.get(key) == body.get(key) for key in ("name", *unique)):
                raise RefusedError(409, f"{kind} with name {body['name']} already exists: conflict")
        row = {**body, "id": str(next(self._ids)), "createTimeSinceEpoch": now()}
        row["lastUpdateTimeSinceEpoch"] = row["createTimeSinceEpoch"]
        rows.append(row)
        return row


def one(kind: str, rows: list[Row], **keys: str) -> Row:
    """Return the row with these values."""
    for row in rows:
        if all(row.get(key) == value for key, value in keys.items()):
            return row
    raise RefusedError(404, f"no {kind} found for {keys}: not found")


def change(row: Row, body: Row) -> Row:
    """Update a row from a body, which replaces all properties."""
    row.update({key: value for key, value in body.items() if key not in _FIXED})
    row["lastUpdateTimeSinceEpoch"] = now()
    return row


def page(rows: list[Row], query: Row) -> Row:
    """Return a page of rows, and a token for the next."""
    size, start = int(query.get("pageSize", 20)), int(query.get("nextPageToken") or 0)
    items, end = rows[start : start + size], start + size
    token = str(end) if end < len(rows) else ""
    return {"items": items, "nextPageToken": token, "pageSize": size, "size": len(items)}


def now() -> str:
    """Return Unix milliseconds as text."""
    return str(time.time_ns() // 1_000_000)
