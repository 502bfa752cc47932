"""Test of a service with the sample of its bundle, by the v2 protocol."""

import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import from_json, one_line
from kfp_ddp.k8s.api import Object
from kfp_ddp.models.bundle import REQUEST, RESPONSE, Bundle
from kfp_ddp.models.interface import Sample, read_sample
from kfp_ddp.models.serving.rollout import CANARY, has_canary
from kfp_ddp.models.serving.wait import predictor_status

# Of the largest logit: half precision, the default of some runtimes, differs by 0.2 %.
TOLERANCE = 0.01
SILENT_SECONDS, WRONG_SECONDS = 60.0, 20.0
"""Seconds without an answer, or with that of the previous model: routes change with a delay."""
_PAUSE = 0.5
_LARGEST_ANSWER = 16 << 20
_PART = 1 << 20


def sample_of(bundle: Bundle) -> Sample:
    """Return the sample of a bundle; raise InputError if the bundle has none, or is damaged."""
    sample = read_sample(bundle)
    if sample is None:
        raise InputError(
            f"the bundle {bundle.uri} has no {REQUEST} to try a service with: export it again"
        )
    if not all(map(math.isfinite, (*sample.logits, sample.allowed))):
        raise bundle.damaged(f"{RESPONSE} has a number that is not finite")
    largest = max(map(abs, sample.logits), default=0.0)
    return sample._replace(allowed=max(sample.allowed, TOLERANCE * largest))


def difference(sample: Sample, answer: bytes) -> str:
    """Return what is wrong with an answer, as text; '' if it is correct."""
    try:
        outputs = {part["name"]: part["data"] for part in from_json(answer)["outputs"]}
        logits = [float(value) for value in outputs[sample.output]]
    except (ValueError, KeyError, TypeError, OverflowError):
        text = one_line(answer[:200].decode("utf-8", "replace"))
        return f"it is not a v2 answer with {sample.output}: {text}"
    if len(logits) != len(sample.logits):
        return f"it has {len(logits)} logits, the bundle {len(sample.logits)}"
    differences = [abs(a - b) for a, b in zip(logits, sample.logits, strict=True)]
    if not all(value <= sample.allowed for value in differences):  # also true for NaN
        worst = next((value for value in differences if math.isnan(value)), max(differences))
        return (
            f"its logits differ from the bundle's by {worst:.3g}, {sample.allowed:.3g} is allowed"
        )
    return ""


def address(service: Object, spec: str = "") -> str:
    """Return the URL of a service in the cluster, or of one predictor; JobError for none."""
    name = service["metadata"]["name"]
    status, predictor = service.get("status") or {}, predictor_status(service)
    own = str((predictor.get("address") or {}).get("url") or "")
    tagged = any(part.get("tag") == "latest" for part in predictor.get("traffic") or ())
    if spec and tagged and own:
        return own.replace("://", "://latest-", 1)
    shared = status.get("address") or {}
    url = own or str(shared.get("url") or status.get("url") or "")
    if not url:
        raise JobError(f"KServe reports no address of InferenceService {name}")
    if has_canary(service, spec):
        return url.replace(f"//{name}-predictor.", f"//{name}-{CANARY}-predictor.")
    return url


def ask(url: str, model: str, sample: Sample, seconds: float) -> tuple[str, float]:
    """Send the sample once; return the error or '', and for how many seconds to retry."""
    path = f"{url.rstrip('/')}/v2/models/{model}/infer"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(path, sample.request, headers)  # noqa: S310
    try:
        # Without a proxy: the address is inside the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=seconds) as answer:
            content = _read_all(answer, time.monotonic() + seconds)
    except urllib.error.HTTPError as error:
        with error:
            text = one_line(error.read(400).decode("utf-8", "replace"))
        return f"{path} answers {error.code}: {text}", SILENT_SECONDS
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        why = f"did not answer within {seconds:g} s" if late else f"does not answer: {reason}"
        return f"{path} {one_line(why)}", SILENT_SECONDS
    wrong = difference(sample, content)
    return (f"{path} returns a wrong result: {wrong}" if wrong else ""), WRONG_SECONDS


def _read_all(answer: HTTPResponse, until: float) -> bytes:
    """Return the body; the timeout of the connection is that of each part only."""
    content = b""
    while len(content) < _LARGEST_ANSWER and (part := answer.read1(_PART)):
        content += part
        if time.monotonic() > until:
            raise TimeoutError
    return content


def check_canary(
    url: str,
    model: str,
    sample: Sample,
    times: int,
    seconds: float,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Send the sample until `times` answers in a row are correct; return the median seconds.

    `check` is called before each. Raise JobError after a wrong or no answer for too long.
    """
    taken: list[float] = []
    wrong_since, latest = 0.0, time.monotonic() + times * seconds
    while len(taken) < times:
        check()
        start = time.monotonic()
        wrong, may_last = ask(url, model, sample, seconds)
        if not wrong:
            taken.append(time.monotonic() - start)
            wrong_since = 0.0
            continue
        wrong_since = wrong_since or start
        if time.monotonic() > min(wrong_since, latest) + may_last:
            raise JobError(wrong)
        taken.clear()
        time.sleep(_PAUSE)
    return sorted(taken)[len(taken) // 2]
