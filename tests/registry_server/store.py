"""What a registry holds, in memory; each operation is a method of its name in the contract."""

import itertools
import time
from typing import Any

Row = dict[str, Any]
_FIXED = {"id", "name", "createTimeSinceEpoch", "registeredModelId", "artifactType"}


class Refused(Exception):  # noqa: N818 (an answer)
    """An answer that is not what was asked for."""

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
        rows = [each for each in self.versions if each["registeredModelId"] == registered_model_id]
        return page(rows, query)

    def find_model_version(self, query: Row) -> Row:
        wanted = {"name": query["name"], "registeredModelId": query["parentResourceId"]}
        return one("model version", self.versions, **wanted)

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
        if any(each["name"] == body["name"] for each in self._artifacts(model_version_id)):
            raise Refused(409, f"model artifact with name {body['name']} already exists: conflict")
        row = self._new("model artifact", self.artifacts, body, "id")
        self._of[row["id"]] = model_version_id
        return row

    def update_model_artifact(self, query: Row, body: Row, model_artifact_id: str) -> Row:
        return change(one("model artifact", self.artifacts, id=model_artifact_id), body)

    def _artifacts(self, version: str) -> list[Row]:
        return [each for each in self.artifacts if self._of.get(each["id"]) == version]

    def _new(self, kind: str, rows: list[Row], body: Row, *unique: str) -> Row:
        """A row of a name that no other one has, among those that share `unique`."""
        for each in rows:
            if all(each.get(key) == body.get(key) for key in ("name", *unique)):
                raise Refused(409, f"{kind} with name {body['name']} already exists: conflict")
        row = {**body, "id": str(next(self._ids)), "createTimeSinceEpoch": now()}
        row["lastUpdateTimeSinceEpoch"] = row["createTimeSinceEpoch"]
        rows.append(row)
        return row


def one(kind: str, rows: list[Row], **wanted: str) -> Row:
    """The row that is so."""
    for each in rows:
        if all(each.get(key) == value for key, value in wanted.items()):
            return each
    raise Refused(404, f"no {kind} found for {wanted}: not found")


def change(row: Row, body: Row) -> Row:
    """What the body has takes the place of what the row had: properties as a whole."""
    row.update({key: value for key, value in body.items() if key not in _FIXED})
    row["lastUpdateTimeSinceEpoch"] = now()
    return row


def page(rows: list[Row], query: Row) -> Row:
    """Some of the rows, and a token for the next."""
    size, start = int(query.get("pageSize", 20)), int(query.get("nextPageToken") or 0)
    found, end = rows[start : start + size], start + size
    token = str(end) if end < len(rows) else ""
    return {"items": found, "nextPageToken": token, "pageSize": size, "size": len(found)}


def now() -> str:
    """Milliseconds, as text."""
    return str(time.time_ns() // 1_000_000)
