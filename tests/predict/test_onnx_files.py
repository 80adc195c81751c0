"""ONNX files that would read other files, or are not what `export` writes, are refused; PyTorch is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from propagauss.errors import InputError
from propagauss.predict import predict
from propagauss.predict.models import onnx_file
from propagauss.predict.models.loading import load

OURS = {"propagauss": "0", "columns": "{}"}
FLOAT = TensorProto.FLOAT


def value(name: str, shape: list[Any] | None, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def written(
    path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], initial: Any = (), opset: int = 17, **more: Any
) -> None:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initial))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **more)
    helper.set_model_props(model, OURS)
    path.write_bytes(model.SerializeToString())


def outside(name: str, location: str) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


X, Y = [value("x", [None, 4])], [value("y", [None, 4])]
ADD = helper.make_node("Add", ["x", "w"], ["y"])


def in_a_node(path: Path) -> None:
    constant = helper.make_node("Constant", [], ["w"], value=outside("w", "/etc/passwd"))
    written(path, [constant, ADD], X, Y)


def in_a_branch(path: Path) -> None:
    constant = helper.make_node("Constant", [], ["w"], value=outside("w", "secret"))
    inner = helper.make_graph([constant], "inner", [], [value("w", [4])])
    flag = helper.make_tensor("flag", TensorProto.BOOL, [], [True])
    branch = helper.make_node("If", ["flag"], ["w"], then_branch=inner, else_branch=inner)
    written(path, [branch, ADD], X, Y, [flag])


def in_a_function(path: Path) -> None:
    constant = helper.make_node("Constant", [], ["w"], value=outside("w", "secret"))
    function = helper.make_function("mine", "f", ["x"], ["y"], [constant, ADD], [helper.make_opsetid("", 17)])
    call = helper.make_node("f", ["x"], ["y"], domain="mine")
    written(path, [call], X, Y, functions=[function])


OUTSIDE: dict[str, Callable[[Path], None]] = {
    "absolute": lambda path: written(path, [ADD], X, Y, [outside("w", "/etc/passwd")]),
    "above": lambda path: written(path, [ADD], X, Y, [outside("w", "../secret")]),
    "beside": lambda path: written(path, [ADD], X, Y, [outside("w", "secret")]),
    "in a node": in_a_node,
    "in a branch": in_a_branch,
    "in a function": in_a_function,
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_tensors_in_other_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    OUTSIDE[name](tmp_path / "m.onnx")
    with pytest.raises(InputError, match=r"m\.onnx is refused, since it would read other files"):
        load(tmp_path / "m.onnx")


def test_sparse_tensors(tmp_path: Path) -> None:
    """A few bytes that become gigabytes of zeros while they are loaded."""
    values, indices = helper.make_tensor("w", FLOAT, [1], [1.0]), helper.make_tensor("i", TensorProto.INT64, [1], [5])
    sparse = helper.make_sparse_tensor(values, indices, [1 << 40])
    in_a_node = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    written(tmp_path / "node.onnx", [in_a_node, ADD], X, Y)
    graph = helper.make_graph([ADD], "g", X, Y, sparse_initializer=[sparse])
    (tmp_path / "graph.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    for name in ("node.onnx", "graph.onnx"):
        with pytest.raises(InputError, match=f"{name} cannot be read as a model.*sparse"):
            load(tmp_path / name)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the most memory of a process from /proc")
def test_constants_that_are_made_of_a_size(tmp_path: Path) -> None:
    """ONNX Runtime would compute them while it loads the file: a gigabyte, of a hundred bytes."""
    size = helper.make_tensor("size", TensorProto.INT64, [1], [1 << 28])
    zeros = helper.make_node("ConstantOfShape", ["size"], ["zeros"])
    total = helper.make_node("ReduceSum", ["zeros"], ["w"], keepdims=0)
    written(tmp_path / "m.onnx", [zeros, total, ADD], X, Y, [size])
    code = (
        "from pathlib import Path; from propagauss.predict.models.loading import load; load(Path('m.onnx'), 1); "
        "print([line for line in open('/proc/self/status') if 'VmHWM' in line][0].split()[1])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 500_000, "kilobytes"


def identity(path: Path, shape: Any, kind: int = FLOAT, **options: Any) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    written(path, [node], [value("x", shape, kind)], [value("y", shape, kind)], **options)


def constant_only(path: Path) -> None:
    number = helper.make_node("Constant", [], ["y"], value=helper.make_tensor("w", FLOAT, [4], [0.0] * 4))
    written(path, [number], [], [value("y", [4])])


def summed(path: Path) -> None:
    written(path, [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], X, [value("y", [])])


def sequence(path: Path) -> None:
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    out = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    written(path, [node], X, [out])


def custom(path: Path) -> None:
    written(path, [helper.make_node("Strange", ["x"], ["y"], domain="who.knows")], X, Y)


ODD: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no inputs": ("takes no inputs", constant_only),
    "single numbers": (r"takes single numbers \(x\), not rows", lambda p: identity(p, [])),
    "texts": (r"takes tensor\(string\)", lambda p: identity(p, [None, 4], TensorProto.STRING)),
    "bfloat16": (r"takes tensor\(bfloat16\)|cannot be read", lambda p: identity(p, [None, 4], TensorProto.BFLOAT16)),
    "complex": ("complex|cannot be read", lambda p: identity(p, [None, 4], TensorProto.COMPLEX64)),
    "one number in all": (r"returns 'y' of shape \[\] for 1 rows", summed),
    "a sequence": (r"returns seq\(tensor\(float\)\)", sequence),
    "op of others": ("cannot be read as a model", custom),
    "newer ops": ("cannot be read as a model", lambda p: identity(p, [None, 4], opset=999)),
    "batch of none": ("different batches", lambda p: identity(p, [0, 4])),
    "no graph": ("cannot be read as a model", lambda p: p.write_bytes(onnx.ModelProto().SerializeToString())),
    "zeros": ("cannot be read as a model", lambda p: p.write_bytes(bytes(1000))),
    "groups": ("cannot be read as a model", lambda p: p.write_bytes(b"\x0b\x0c" * 100)),
    "long numbers": ("cannot be read as a model", lambda p: p.write_bytes(b"\xff" * 1000)),
    "of ONNX Runtime": ("cannot be read as a model", lambda p: p.write_bytes(b"\x00\x00\x00\x00ORTM" + bytes(100))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_models(name: str, tmp_path: Path) -> None:
    message, make = ODD[name]
    make(tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
    with pytest.raises(InputError, match=message):
        predict(tmp_path / "m.onnx", tmp_path / "x.npy", tmp_path / "out.csv", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "x.npy"]


def test_what_export_writes_passes(exported: Any) -> None:
    for made in exported.values():
        if made.onnx:
            onnx_file.check(made.onnx.read_bytes())


def nested(depth: int) -> bytes:
    """Graphs in attributes of nodes of graphs."""

    def field(number: int, content: bytes) -> bytes:
        length, size = b"", len(content)
        while True:
            size, byte = size >> 7, size & 127
            length += bytes([byte | (128 if size else 0)])
            if not size:
                return bytes([number << 3 | 2]) + length + content

    graph = b""
    for _ in range(depth):
        graph = field(1, field(5, field(6, graph)))
    return field(7, graph)


def test_deep_graphs() -> None:
    onnx_file.check(nested(3))
    with pytest.raises(ValueError, match="nested too deeply"):
        onnx_file.check(nested(1000))


def test_torch_is_not_imported(exported: Any, table: Any, tmp_path: Path) -> None:
    """Start-up and memory of the command with an ONNX model."""
    import pyarrow.parquet as pq

    pq.write_table(table, tmp_path / "data.parquet")
    arguments = ["predict", str(exported["classifier"].onnx), str(tmp_path / "data.parquet"), "--threads", "1"]
    outs = [str(tmp_path / name) for name in ("out.parquet", "out.csv")]
    script = (
        "import sys\nfrom propagauss import cli\n"
        f"codes = [cli.main({arguments!r} + ['--out', out]) for out in {outs!r}]\n"
        "print(codes, sorted(set(sys.modules) & {'torch', 'onnx', 'ray', 'scipy', 'propagauss.predictive'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "[0, 0] []", done.stdout + done.stderr
