"""What runs left and nobody uses: published copies of datasets, and bundles at a destination."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from kfp_ddp.client.models import Model
from kfp_ddp.core.settings import mapping_in
from kfp_ddp.datasets.volume.cluster import CLAIMS
from kfp_ddp.datasets.volume.publish import collect
from kfp_ddp.datasets.volume.request import DOMAIN, MANAGED, VolumeRequest
from kfp_ddp.jobs.identity import live_runs
from kfp_ddp.k8s.api import Api
from kfp_ddp.k8s.objects import label
from kfp_ddp.models import champion as champions
from kfp_ddp.models.bundle import LARGEST_CONFIG, LINEAGE
from kfp_ddp.models.serving.rollout import versions_in_service
from kfp_ddp.storage.kinds import open_store
from kfp_ddp.storage.store import Store

LASTING = timedelta(days=1)  # of an upload
UPLOADED = re.compile(rf"[^/]+/[0-9a-f]{{12}}/{re.escape(LINEAGE)}")


def copies(api: Api, keep: int, *, dry_run: bool) -> Iterator[str]:
    """Delete unused copies of each dataset but the `keep` newest, and yield their names."""
    selector = ",".join(f"{key}={value}" for key, value in MANAGED.items())
    claims = api.list_objects(CLAIMS, {"labelSelector": selector}, retry=True)
    for dataset in sorted({label(claim, f"{DOMAIN}/dataset") for claim in claims} - {""}):
        fields: dict[str, Any] = {"dataset": dataset, "keep_claims": keep}
        yield from collect(api, VolumeRequest.model_construct(**fields), "", dry_run)


def bundles(api: Api, where: Store, keep: int, *, dry_run: bool) -> Iterator[str]:
    """Delete old versions that runs have published, and their unfinished uploads; yield the names.

    The `keep` newest of each model remain, its champion, the version that this replaced, those in
    service, and all while there is no champion.
    """
    known, serving, alive = champions.list_versions(where), versions_in_service(api), live_runs(api)
    for model in known:
        folder, champion = open_store(f"{where.uri}/{model}"), champions.read_pointer(where, model)
        used = {champion, champions.replaced_by(champions.history(folder), champion), *serving}
        ours = [
            one.version for one in Model(where, model).versions() if one.run_id and not one.damaged
        ]
        for version in ours[keep:] if champion else ():
            if version not in used and (dry_run or champions.delete(folder, version)):
                yield f"{model}/{version}"
    latest = (datetime.now(UTC) - LASTING).isoformat()
    for path in [name for name, _ in where.list("") if UPLOADED.fullmatch(name)]:
        model, version, _ = path.split("/")
        lineage = mapping_in(where.read(path, LARGEST_CONFIG))
        run, at = str(lineage.get("run_id") or ""), str(lineage.get("exported_at") or "")
        left = run and not alive(run) and "2020" < at < latest  # both in ISO 8601
        if left and version not in known.get(model, ()):
            files = () if dry_run else where.entries(f"{model}/{version}/")
            for file in sorted(files, key=lambda file: file == path):  # by which it is resumed
                where.delete(file)
            yield f"{model}/{version}"
