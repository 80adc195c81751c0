"""Archives that try to run code, or to take more memory than they have bytes: a good one, changed."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Entries = dict[str, bytes]
MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"


class Payload:
    """Unpickled, it makes the file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def entries(path: Path) -> Entries:
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def write(path: Path, found: Entries, root: str = "archive/", compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in found.items():
            archive.writestr(root + name, content)


def pickled(marker: Path) -> bytes:
    """As torch.save writes it."""
    file = io.BytesIO()
    torch.save(Payload(marker), file)
    return file.getvalue()


def python(marker: Path) -> str:
    return f"__import__('os').mkdir({str(marker)!r})"


def changed(found: Entries, name: str, change: Callable[[Any], Any]) -> None:
    """An entry that is JSON."""
    content = json.loads(found[name])
    content = change(content) or content
    found[name] = json.dumps(content).encode()


def first_weight(found: Entries, **changes: Any) -> None:
    def change(config: Any) -> None:
        next(iter(config["config"].values())).update(changes)

    changed(found, WEIGHTS, change)


def first_meta(found: Entries, **changes: Any) -> None:
    def change(config: Any) -> None:
        next(iter(config["config"].values()))["tensor_meta"].update(changes)

    changed(found, WEIGHTS, change)


def sample_inputs(found: Entries, marker: Path) -> None:
    found[SAMPLES] = pickled(marker)


def pickled_weight(found: Entries, marker: Path) -> None:
    first_weight(found, use_pickle=True)
    found["data/weights/weight_0"] = pickled(marker)


def pickled_constant(found: Entries, marker: Path) -> None:
    weight = next(iter(json.loads(found[WEIGHTS])["config"].values()))

    def change(config: Any) -> None:
        constants = config["config"] or {"mine": weight | {"path_name": "tensor_0"}}  # some programs have none
        next(iter(constants.values())).update(use_pickle=True)
        config["config"] = constants

    changed(found, CONSTANTS, change)
    found["data/constants/tensor_0"] = pickled(marker)


def opaque_constant(found: Entries, marker: Path) -> None:
    def change(config: Any) -> None:
        config["config"]["mine"] = {
            "path_name": "opaque_obj_0",
            "is_param": False,
            "use_pickle": True,
            "tensor_meta": None,
        }

    changed(found, CONSTANTS, change)
    found["data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def legacy_weights(found: Entries, marker: Path) -> None:
    found["data/weights/model.pt"] = pickled(marker)


def legacy_constants(found: Entries, marker: Path) -> None:
    found["data/constants/model.pt"] = pickled(marker)


def walk(value: Any, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Every dictionary that has this key."""
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        walk(each, key, change)
    if isinstance(value, dict) and key in value:
        change(value)


def size(expression: Callable[[Path], str]) -> Callable[[Entries, Path], None]:
    def make(found: Entries, marker: Path) -> None:
        changed(found, MODEL, lambda m: walk(m, "expr_str", lambda each: each.update(expr_str=expression(marker))))

    return make


def renamed(found: Entries, marker: Path) -> None:
    """A node whose name is a statement: names are written into code that is executed."""
    old = json.loads(found[MODEL])["graph_module"]["graph"]["nodes"][0]["outputs"][0]["as_tensor"]["name"]
    new = f"{old} = {python(marker)}; {old}"
    found[MODEL] = found[MODEL].replace(json.dumps(old).encode(), json.dumps(new).encode())


def target(name: str, *arguments: Callable[[Path], Any]) -> Callable[[Entries, Path], None]:
    """The first op calls something else."""

    def make(found: Entries, marker: Path) -> None:
        def change(model: Any) -> None:
            node = model["graph_module"]["graph"]["nodes"][0]
            node["target"] = name
            if arguments:
                node["inputs"] = [{"name": "", "arg": each(marker), "kind": 1} for each in arguments]

        changed(found, MODEL, change)

    return make


def guards(found: Entries, marker: Path) -> None:
    changed(found, MODEL, lambda model: model.update(guards_code=[python(marker)]))


def defaultdict(found: Entries, marker: Path) -> None:
    """A structure of outputs that imports a module by its name."""
    (marker.parent / "hostile_module.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    factory = {"default_factory_module": "hostile_module", "default_factory_name": "os"}
    context = {**factory, "dict_context": ["mean", "variance", "probabilities"]}
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": [leaf] * 3}])

    def change(model: Any) -> None:
        model["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = spec

    changed(found, MODEL, change)


def argument_names(found: Entries, marker: Path) -> None:
    def change(model: Any) -> None:
        signature = model["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = [f"a={python(marker)}"]

    changed(found, MODEL, change)


def entry(name: str, content: bytes = b"x") -> Callable[[Entries, Path], None]:
    return lambda found, marker: found.update({name: content})


def meta(**changes: Any) -> Callable[[Entries, Path], None]:
    return lambda found, marker: first_meta(found, **changes)


def weight(**changes: Any) -> Callable[[Entries, Path], None]:
    return lambda found, marker: first_weight(found, **changes)


def model(change: Callable[[Any], Any]) -> Callable[[Entries, Path], None]:
    return lambda found, marker: changed(found, MODEL, change)


def empty_payload(found: Entries, marker: Path) -> None:
    """PyTorch fills what has no bytes with zeros, as many as are asked for."""
    found["data/weights/weight_0"] = b""
    first_meta(found, sizes=[{"as_int": 1 << 40}], strides=[{"as_int": 1}])


def subgraph(found: Entries, marker: Path) -> None:
    def change(program: Any) -> None:
        graph = program["graph_module"]["graph"]
        inner = {"as_graph": {"name": "inner", "graph": {**graph, "nodes": []}}}
        graph["nodes"][0]["inputs"][0]["arg"] = inner

    changed(found, MODEL, change)


def symbol(name: str) -> Callable[[Entries, Path], None]:
    return model(lambda program: program["range_constraints"].update({name: {"min_val": 0, "max_val": None}}))


def text(content: Any) -> Callable[[Path], Any]:
    return lambda marker: {"as_string": content if content is not None else str(marker)}


CODE: dict[str, Callable[[Entries, Path], None]] = {
    "pickled sample inputs": sample_inputs,
    "pickled weight": pickled_weight,
    "pickled constant": pickled_constant,
    "opaque constant": opaque_constant,
    "legacy weights": legacy_weights,
    "legacy constants": legacy_constants,
    "size that is Python": size(python),
    "name that is Python": renamed,
    "function of the system": target("torch.os.mkdir", text(None)),
    "guard that is Python": guards,
    "structure that imports": defaultdict,
    "arguments that are Python": argument_names,
}

REAL = {  # those that torch.export.load 2.13 runs
    *("pickled sample inputs", "pickled weight", "pickled constant", "opaque constant", "legacy weights"),
    *("legacy constants", "size that is Python", "structure that imports"),
}
INT = [{"as_int": 1 << 40}]
ODD: dict[str, Callable[[Entries, Path], None]] = {
    "strides beyond the tensor": target("torch.ops.aten._reshape_alias.default"),
    "indices that are believed": target("torch.ops.aten._sparse_coo_tensor_unsafe.default"),
    "indices of a maximum": target("torch.ops.aten.max_pool2d_with_indices_backward.default"),
    "lengths that are believed": target("torch.ops.aten.segment_reduce.default"),
    "compiled code": entry("data/aotinductor/model/model.so", b"\x7fELF"),
    "another model": lambda found, marker: found.update({"models/other.json": found[MODEL]}),
    "unknown entry": entry("data/executorch/program"),
    "unused weight": entry("data/weights/weight_77"),
    "entry above": entry("../../escape"),
    "entry with a backslash": entry("data\\\\x"),
    "older layout": entry("serialized_exported_program.json"),
    "no bytes for many zeros": empty_payload,
    "more numbers than bytes": meta(sizes=INT, strides=[{"as_int": 1}]),
    "one number for many": meta(sizes=INT, strides=[{"as_int": 0}]),
    "numbers before the first": meta(storage_offset={"as_int": -8}),
    "numbers after the last": meta(storage_offset={"as_int": 8}),
    "negative strides": meta(strides=[{"as_int": -4}, {"as_int": 1}]),
    "sizes that are symbols": meta(sizes=[{"as_expr": {"expr_str": "s0", "hint": None}}] * 2),
    "unknown type": meta(dtype=99),
    "sparse": meta(layout=1),
    "weight elsewhere": weight(path_name="../../../etc/passwd"),
    "weight that is a constant": weight(path_name="tensor_0"),
    "weight without a place": weight(path_name=None),
    "no meta": weight(tensor_meta=None),
    "library": target("torch.ops.load_library", text("x.so")),
    "file of the system": target("torch.ops.aten.from_file.default", text(None)),
    "file to write": target("torch.ops.aten.save.default", text(None)),
    "ops of others": target("torch.ops.prims.device_put.default"),
    "function by its parts": target("torch.ops.aten.add.__class__"),
    "extension": target("#aoti:model.so"),
    "no function": target("aten"),
    "tower of powers": size(lambda marker: "Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"),
    "power of powers": size(lambda marker: "Pow(Pow(Pow(Integer(9), Integer(8)), Integer(8)), Integer(8))"),
    "shift": size(lambda marker: "LShift(Integer(1), Integer(999999999999))"),
    "lambda": size(lambda marker: "(lambda: 1)()"),
    "attribute": size(lambda marker: "Symbol('s0').__class__"),
    "deep size": size(lambda marker: "Add(" * 4000 + ")" * 4000),
    "symbol to count up to": symbol("u99999999999"),
    "symbol that is Python": symbol("__import__"),
    "subgraph": subgraph,
    "custom object": model(lambda p: p["graph_module"]["graph"]["custom_obj_values"].update(x={"name": "x"})),
    "unknown part": model(lambda p: p.update(loader="x")),
    "program that is a list": model(lambda p: [p]),
    "deep JSON": entry(MODEL, b"[" * 100_000 + b"]" * 100_000),
    "JSON that is text": entry(MODEL, b"\xff\xfe{"),
    "huge number": entry(MODEL, b'{"a": ' + b"9" * 10_000 + b"}"),
    "other byte order": entry("byteorder", b"big"),
    "other format": entry("archive_format", b"zip"),
    "long mark": entry("archive_version", b"0" * 5000),
    "details that are a list": entry("extra/propagauss.json", b"[]"),
    "details that are numbers": entry("extra/propagauss.json", b'{"propagauss": 1, "inputs": 3}'),
    "details without inputs": entry("extra/propagauss.json", b'{"propagauss": "1"}'),
    "deep details": entry("extra/propagauss.json", b'{"a":' * 50_000),
}
