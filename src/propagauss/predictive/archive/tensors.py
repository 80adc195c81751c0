"""Weights and constants of a `.pt2`: bytes of numbers, never pickled, and never more numbers than there are bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from propagauss.predictive.archive.refused import Refused

BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2}  # of a dtype, by its number
BYTES |= {28: 2, 29: 1, 30: 1, 31: 1, 32: 1, 33: 1, 34: 4, 35: 8}
STRIDED = 7
PAYLOAD = {"path_name", "is_param", "use_pickle", "tensor_meta"}
META = {"dtype", "sizes", "requires_grad", "device", "strides", "storage_offset", "layout"}
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,500}")


def check(config: Any, sizes: Mapping[str, int], prefix: str) -> None:
    """Every tensor lies within the bytes of its payload, and every payload belongs to a tensor."""
    if not isinstance(config, dict) or set(config) != {"config"} or not isinstance(config["config"], dict):
        raise Refused("a list of its tensors is malformed")
    dtypes: dict[str, int] = {}
    for name, payload in config["config"].items():
        if not NAME.fullmatch(name):
            raise Refused(f"it has a tensor named {name[:100]!r}")
        _check_payload(name, payload, sizes, prefix)
        path, dtype = payload["path_name"], payload["tensor_meta"]["dtype"]
        if dtypes.setdefault(path, dtype) != dtype:
            raise Refused(f"{path} is said to be of two types")
    unused = sorted(set(sizes) - set(dtypes))
    if unused:
        raise Refused(f"{unused[0][:100]!r} belongs to no tensor")


def _check_payload(name: str, payload: Any, sizes: Mapping[str, int], prefix: str) -> None:
    if not isinstance(payload, dict) or set(payload) != PAYLOAD:
        raise Refused(f"what is said of tensor {name!r} is malformed")
    if payload["use_pickle"] is not False or payload["tensor_meta"] is None:
        raise Refused(f"tensor {name!r} is pickled")
    path, meta = payload["path_name"], payload["tensor_meta"]
    if not isinstance(path, str) or not re.fullmatch(rf"{prefix}[0-9]{{1,9}}", path) or path not in sizes:
        raise Refused(f"tensor {name!r} is said to be in {str(path)[:100]!r}")
    if not isinstance(payload["is_param"], bool) or not isinstance(meta, dict) or set(meta) != META:
        raise Refused(f"what is said of tensor {name!r} is malformed")
    _check_place(name, meta, sizes[path])


def _check_place(name: str, meta: dict[str, Any], size: int) -> None:
    if meta["dtype"] not in BYTES or meta["layout"] != STRIDED or not isinstance(meta["requires_grad"], bool):
        raise Refused(f"tensor {name!r} is of a type that export does not write")
    device = meta["device"]
    if not isinstance(device, dict) or not re.fullmatch(r"[a-z]{1,20}", str(device.get("type"))):
        raise Refused(f"tensor {name!r} is on no known device")
    shape, strides = _numbers(name, meta["sizes"]), _numbers(name, meta["strides"])
    (offset,) = _numbers(name, [meta["storage_offset"]])
    entries, left = divmod(size, BYTES[meta["dtype"]])
    if left or len(shape) != len(strides):
        raise Refused(f"tensor {name!r} does not fit its bytes")
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(shape) > entries or (math.prod(shape) and last >= entries):
        raise Refused(f"tensor {name!r} is said to be of shape {shape[:8]}, but has {size:,} bytes")


def _numbers(name: str, stored: Any) -> list[int]:
    if not isinstance(stored, list) or not all(isinstance(each, dict) and set(each) == {"as_int"} for each in stored):
        raise Refused(f"the sizes of tensor {name!r} are malformed")
    found = [each["as_int"] for each in stored]
    if len(found) > 64 or not all(type(n) is int and 0 <= n < 1 << 63 for n in found):
        raise Refused(f"the sizes of tensor {name!r} are malformed")
    return found
