"""A look into the bytes of an ONNX file, before ONNX Runtime reads it: does it keep its tensors in other files?

Such a file names them by paths, which may lead anywhere. `export` writes one file, so all others are refused, and so
are sparse tensors: ONNX Runtime writes out all of their zeros, which may be many more bytes than the file has. This
reads the few fields of the format (protobuf) that can hold a tensor, and needs neither the package onnx nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

# what may hold a tensor: for each kind of message, the number of the field, and what kind is in it
FIELDS = {
    "model": {7: "graph", 25: "function", 20: "training"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "function": {7: "node", 11: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "tensor": {},
}
EXTERNAL, LOCATION = 13, 14  # of a tensor: where its numbers are, and that they are elsewhere
DEPTH = 64
GRAPH = 7


class Outside(ValueError):
    """The numbers of a tensor are in another file."""


def check(stored: bytes) -> None:
    """Refuse what is not an ONNX file, and tensors outside of it."""
    view = memoryview(stored)
    if not any(number == GRAPH for number, _ in _fields(view)):
        raise ValueError("it holds no graph")
    _check(view, "model", 0)


def _check(message: memoryview, kind: str, depth: int) -> None:
    if depth > DEPTH:
        raise ValueError("its graphs are nested too deeply")
    if kind == "sparse":
        raise ValueError("a tensor of it is sparse, which export never writes")
    inner = FIELDS[kind]
    for number, content in _fields(message):
        if kind == "tensor" and (number == EXTERNAL or (number == LOCATION and content != 0)):
            raise Outside("a tensor of it is kept outside")
        if number in inner:
            if not isinstance(content, memoryview):
                raise ValueError("it is not an ONNX file")
            _check(content, inner[number], depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Numbers and contents of the fields."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        if tag >> 32 or tag < 8:  # readers differ in what they make of such numbers
            raise ValueError("it is not an ONNX file")
        form = tag & 7
        content: memoryview | int = 0
        if form == 0:
            content, at = _varint(message, at)
        elif form == 2:
            length, at = _varint(message, at)
            content = message[at : at + length]
            at += length
        elif form in (1, 5):
            at += 8 if form == 1 else 4
        else:
            raise ValueError("it is not an ONNX file")
        if at > end:
            raise ValueError("it ends too early")
        yield tag >> 3, content


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("it is not an ONNX file, or ends too early")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
