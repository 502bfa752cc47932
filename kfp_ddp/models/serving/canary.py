"""The bundle's own sample, sent to a service by the v2 protocol, and what came back compared."""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from kfp_ddp.core.errors import InputError, JobError
from kfp_ddp.core.text import one_line
from kfp_ddp.k8s.api import Object
from kfp_ddp.models.bundle import REQUEST, RESPONSE, Bundle
from kfp_ddp.models.serving.wait import component

# Of the largest logit: half precision, which some runtimes choose by themselves, is off by 0.2 %.
TOLERANCE = 0.01
SILENT_SECONDS, WRONG_SECONDS = 60.0, 20.0
"""How long nobody may answer, or what was before, as routes to a new pod take their time."""
_PAUSE = 0.5
_LARGEST = 64 << 20
_LARGEST_ANSWER = 16 << 20
_PART = 1 << 20


@dataclass(frozen=True)
class Sample:
    """A request of the v2 protocol, and the logits that answer it."""

    request: bytes
    output: str
    logits: tuple[float, ...]
    allowed: float
    """What each may differ by."""

    @classmethod
    def of(cls, bundle: Bundle) -> "Sample":
        """That of a bundle.

        Raises:
            InputError: the bundle has none, or it is damaged.
        """
        request, said = bundle.read(REQUEST, _LARGEST), bundle.read(RESPONSE, _LARGEST)
        if request is None or said is None:
            raise InputError(
                f"the bundle {bundle.uri} has no {REQUEST} to try a service with: export it again"
            )
        try:
            json.loads(request)
            response = json.loads(said)
            (output,) = response["outputs"]
            logits = tuple(map(float, output["data"]))
            given = float(response["parameters"]["allowed_abs_difference"])
            name = str(output["name"])
            if not all(map(math.isfinite, (*logits, given))):
                raise ValueError("a number in it is not finite")
        except (ValueError, KeyError, TypeError) as error:
            raise bundle.damaged(f"{RESPONSE} holds no answer ({error!r})") from None
        allowed = max(given, TOLERANCE * max(map(abs, logits), default=0.0))
        return cls(request, name, logits, allowed)

    def difference(self, answer: bytes) -> str:
        """What is wrong with an answer, in words; '' for nothing."""
        try:
            outputs = {each["name"]: each["data"] for each in json.loads(answer)["outputs"]}
            found = [float(value) for value in outputs[self.output]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            said = one_line(answer[:200].decode("utf-8", "replace"))
            return f"it is no v2 answer with {self.output}: {said}"
        if len(found) != len(self.logits):
            return f"it has {len(found)} logits, the bundle {len(self.logits)}"
        apart = [abs(a - b) for a, b in zip(found, self.logits, strict=True)]
        if not all(each <= self.allowed for each in apart):  # NaN is not, but max passes over it
            worst = next((each for each in apart if math.isnan(each)), max(apart))
            return (
                f"its logits differ from the bundle's by {worst:.3g}, {self.allowed:.3g} is allowed"
            )
        return ""


def address(service: Object, newest: bool = False) -> str:
    """Where a service answers inside the cluster, or its newest predictor alone.

    With Knative the newest revision has an address of its own, by the tag that a rollout asks for.

    Raises:
        JobError: the status tells none.
    """
    status, predictor = service.get("status") or {}, component(service)
    own = _url(predictor.get("address"))
    tagged = any(each.get("tag") == "latest" for each in predictor.get("traffic") or ())
    if newest and tagged and own:
        return own.replace("://", "://latest-", 1)
    found = own or _url(status.get("address")) or str(status.get("url") or "")
    if not found:
        name = service["metadata"]["name"]
        raise JobError(f"KServe tells no address of InferenceService {name}")
    return found


def _url(part: Any) -> str:
    return str((part or {}).get("url") or "")


def ask(url: str, model: str, sample: Sample, seconds: float) -> tuple[str, float]:
    """Send the sample once: what is wrong, '' for nothing, and for how long that may go on."""
    path = f"{url.rstrip('/')}/v2/models/{model}/infer"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(path, sample.request, headers)  # noqa: S310
    try:
        # Not by a proxy: the address is one of the cluster.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=seconds) as answer:
            content = _whole(answer, time.monotonic() + seconds)
    except urllib.error.HTTPError as error:
        with error:
            said = one_line(error.read(400).decode("utf-8", "replace"))
        return f"{path} answers {error.code}: {said}", SILENT_SECONDS
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        why = f"did not answer within {seconds:g} s" if late else f"does not answer: {reason}"
        return f"{path} {one_line(why)}", SILENT_SECONDS
    wrong = sample.difference(content)
    return (f"{path} answers wrongly: {wrong}" if wrong else ""), WRONG_SECONDS


def _whole(answer: HTTPResponse, until: float) -> bytes:
    """What an answer holds; the time-out of the connection is that of each of its parts alone."""
    content = b""
    while len(content) < _LARGEST_ANSWER and (part := answer.read1(_PART)):
        content += part
        if time.monotonic() > until:
            raise TimeoutError
    return content


def try_out(
    url: str,
    model: str,
    sample: Sample,
    times: int,
    seconds: float,
    go_on: Callable[[], None] = lambda: None,
) -> float:
    """Send the sample until it was answered rightly so often in a row; the median seconds.

    Args:
        url: Of the server.
        model: What it calls the model.
        sample: What is sent.
        times: How often it has to be answered.
        seconds: In which it has to be answered once.
        go_on: Called before each request; what it raises ends this.

    Raises:
        JobError: no answer, or a wrong one, for longer than may be.
    """
    taken: list[float] = []
    first = time.monotonic()
    while len(taken) < times:
        go_on()
        began = time.monotonic()
        wrong, may_last = ask(url, model, sample, seconds)
        if not wrong:
            taken.append(time.monotonic() - began)
            continue
        if time.monotonic() > first + may_last:
            raise JobError(wrong)
        taken.clear()
        time.sleep(_PAUSE)
    return sorted(taken)[len(taken) // 2]
