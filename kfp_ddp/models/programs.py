"""`torch.export` programs of bundles, loaded as data.

`torch.export.load` unpickles weights, constants and sample inputs, and compiles names, guards and
expressions of the graph as Python, and imports what the types of its inputs and outputs name. So an
archive is checked and written again with the weights and the graph only, and with names of
operators, symbols, values and types that cannot be code.
"""

import io
import json
import re
import zipfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_ddp.core.errors import InputError
from kfp_ddp.models.onnx_runtimes import Logits

MAX_BATCH = 1024
"""Images that a program computes at once."""
_SAMPLES = re.compile(r"[^/]+/data/sample_inputs/\w+\.pt")
_ENTRY = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|version|\.data/\w+|(?P<graph>models/\w+\.json)"
    r"|data/(weights|constants)/((?P<config>\w+_config\.json)|(weight|tensor)_\d+))"
)
_PLAIN = re.compile(r"[\w.+]*")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|prims|higher_order|torchvision)\.(?!__)\w+(\.(?!__)\w+)?|torch\.sym_\w+"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge|and_|or_)"
)
_EXPRESSION = re.compile(
    r"((Symbol|Integer|Rational|Add|Mul|Pow|Max|Min|Mod|PythonMod|FloorDiv|CleanDiv)\("
    r"|(Eq|Ne|Lt|Le|Gt|Ge|And|Or|Not)\(|'[a-z]+\d+'|[a-z]+\d|\w{1,40}=(True|False)|\d"
    r"|[-+*/<>=(), ])*"  # no text in two ways, for which the time would be exponential
)
# Tuples, lists and dicts without keys: other types and enumerations have modules to import.
_SPEC = re.compile(
    r'("(type|context|children_spec|builtins\.(tuple|list|dict)|null|\[\])"|null|1|[][{}:, ])*'
)
_RULES = {
    **dict.fromkeys(("target", "as_operator"), _OPERATOR),
    **dict.fromkeys(("in_spec", "out_spec"), _SPEC),
    "expr_str": _EXPRESSION,
    "as_string": re.compile(".*", re.DOTALL),
}
_DROPPED: dict[str, Any] = {"metadata": {}, "guards_code": []}


def load(content: bytes) -> Logits:
    """Return the function of a program, on the CPU; refuse what Python would run."""
    import torch

    try:
        module = torch.export.load(io.BytesIO(_as_data(content))).module()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"torch cannot load the program: {str(error)[:250]!r}; use model.onnx with ONNX Runtime"
        ) from error

    def logits(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        with torch.inference_mode():
            parts = [images[at : at + MAX_BATCH] for at in range(0, len(images), MAX_BATCH)]
            return np.concatenate([module(torch.from_numpy(part)).numpy() for part in parts])

    return logits


def _as_data(content: bytes) -> bytes:
    """Return the archive with its weights and graph only."""
    output = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(output, "w") as target:
            entries = source.infolist()
            if sum(entry.file_size for entry in entries) > len(content):
                raise _refused("it is compressed")
            for entry in entries:
                target.writestr(entry.filename, _checked(entry.filename, source.read(entry)))
    except InputError:
        raise
    except (zipfile.BadZipFile, AttributeError, LookupError, TypeError, ValueError, OSError):
        raise _refused("it is damaged") from None
    except RecursionError:
        raise _refused("its graph is too deep") from None
    return output.getvalue()


def _checked(name: str, content: bytes) -> bytes:
    if _SAMPLES.fullmatch(name):
        return b""
    match = _ENTRY.fullmatch(name)
    if match is None:
        raise _refused(f"it has the entry {name}")
    if match["config"]:
        for entry in json.loads(content)["config"].values():
            kind = re.match("weight_|tensor_", entry["path_name"])
            if entry["use_pickle"] is not False or kind is None:
                raise _refused(f"{name} has pickled or custom objects")
    if match["graph"]:
        return json.dumps(_plain("", json.loads(content))).encode()
    return content


def _plain(key: str, value: Any) -> Any:
    """Return a value of the graph without metadata and guards; refuse what could be code."""
    if key in _DROPPED:
        return _DROPPED[key]
    if isinstance(value, dict):
        return {_plain("", name): _plain(name, part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(key, part) for part in value]
    if isinstance(value, str) and not _RULES.get(key, _PLAIN).fullmatch(value):
        raise _refused(f"its graph has {value[:100]!r}")
    return value


def _refused(why: str) -> InputError:
    return InputError(
        f"model.pt2 is refused, as it could run code: {why}; use model.onnx with ONNX Runtime"
    )
