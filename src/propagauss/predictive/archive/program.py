"""The program of a `.pt2`: JSON in which only names, numbers and ops of PyTorch may stand.

PyTorch turns parts of it into Python: names are written into code that is executed, sizes are evaluated, a target
such as `torch.os.system` is looked up and called. So every key has to be known here, and every text has one of a few
forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from propagauss.predictive.archive.expressions import check_size
from propagauss.predictive.archive.ops import check_op
from propagauss.predictive.archive.refused import Refused

INNER = {  # of these the contents are looked at; what is below them and not a text is a number
    *("graph_module", "graph", "signature", "module_call_graph", "nodes", "inputs", "outputs", "input_specs"),
    *(
        "output_specs",
        "arg",
        "buffer",
        "parameter",
        "tensor_constant",
        "user_input",
        "user_output",
        "persistent",
        "kind",
    ),
    *("as_tensor", "as_tensors", "as_int", "as_ints", "as_bool", "as_bools", "as_none", "as_expr", "as_sym_int"),
    *("as_sym_ints", "as_sym_bool", "as_sym_bools", "as_sym_float", "as_sym_floats", "as_scalar_type", "as_layout"),
    *("as_memory_format", "as_device", "as_optional_tensor", "as_optional_tensors", "as_int_lists", "as_complex"),
    *("real", "imag", "hint", "sizes", "strides", "storage_offset", "dtype", "layout", "device", "index"),
    *("requires_grad", "is_single_tensor_return", "is_hop_single_tensor_return", "min_val", "max_val"),
    *("schema_version", "major", "minor", "constant_input", "value"),
}
MAPS = ("tensor_values", "sym_int_values", "sym_bool_values", "sym_float_values", "range_constraints", "opset_version")
EMPTY = ("custom_obj_values", "treespec_namedtuple_fields", "guards_code")
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,500}")
NAME = re.compile(rf"({IDENTIFIER.pattern})?")  # arguments of functions that are no ops have none
DOTTED = re.compile(r"[A-Za-z0-9_.\-]{0,500}")
VERSION = re.compile(r"[A-Za-z0-9_.+\-]{0,100}")
ARGUMENT = re.compile(r"[ -~]{0,500}")  # a text for an op, such as "tanh": written into code as a literal
TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict"}


def stripped(model: Any, known_ops: bool) -> dict[str, Any]:
    """The program without what is only for people and debuggers; refused if anything else than a program is in it."""
    if not isinstance(model, dict):
        raise Refused("it holds no program")
    _drop_remarks(model)
    _Walk(known_ops).inside(model)
    return model


def _drop_remarks(value: Any) -> None:
    """Where each op came from, and guards, which are Python; sizes are checked by whoever runs the program."""
    if isinstance(value, dict):
        for name in {"metadata", "guards_code"} & set(value):
            value[name] = type(value[name])() if isinstance(value[name], dict | list) else value[name]
        for each in value.values():
            _drop_remarks(each)
    elif isinstance(value, list):
        for each in value:
            _drop_remarks(each)


class _Walk:
    def __init__(self, known_ops: bool):
        ops = check_op if known_ops else _text("target", DOTTED)
        self.texts: dict[str, Callable[[Any], None]] = {
            "target": ops,
            "expr_str": check_size,
            "in_spec": _check_tree,
            "out_spec": _check_tree,
            "torch_version": _text("torch_version", VERSION),
            "as_string": _text("as_string", ARGUMENT),
            "as_strings": _texts("as_strings", ARGUMENT),
            "as_float": _check_float,
            "as_floats": _each(_check_float),
            "verifiers": _texts("verifiers", IDENTIFIER),
            "forward_arg_names": _texts("forward_arg_names", IDENTIFIER),
            "name": _text("name", NAME),
            **{name: _text(name, IDENTIFIER) for name in ("as_name", "type")},
            **{n: _text(n, DOTTED) for n in ("fqn", "parameter_name", "buffer_name", "tensor_constant_name")},
        }

    def inside(self, value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                self.inside(each)
        elif isinstance(value, dict):
            for name, each in value.items():
                self.entry(name, each)
        elif isinstance(value, str):
            raise Refused(f"its program has a text where there is none ({value[:60]!r})")

    def entry(self, name: str, value: Any) -> None:
        if name in self.texts:
            if value is not None:
                self.texts[name](value)
        elif name in MAPS:
            for key, each in _dictionary(name, value).items():
                _text(name, IDENTIFIER)(key)
                self.inside(each)
            if name == "range_constraints":
                check_symbols(value)
        elif name in INNER:
            self.inside(value)
        elif name in (*EMPTY, "metadata"):
            if value:
                raise Refused(f"its program has {name}")
        else:
            raise Refused(f"its program has an unknown part ({name[:60]!r})")


def check_symbols(value: dict[str, Any]) -> None:
    for name in value:
        check_size(f"Symbol({name!r})")


def _text(name: str, form: re.Pattern[str]) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise Refused(f"its program has {str(value)[:60]!r} as {name}")

    return check


def _texts(name: str, form: re.Pattern[str]) -> Callable[[Any], None]:
    return _each(_text(name, form))


def _each(check: Callable[[Any], None]) -> Callable[[Any], None]:
    def all_of(values: Any) -> None:
        if not isinstance(values, list):
            raise Refused(f"its program has {str(values)[:60]!r} for a list")
        for value in values:
            check(value)

    return all_of


def _check_float(value: Any) -> None:
    if not isinstance(value, int | float) and value not in ("Infinity", "-Infinity", "NaN"):
        raise Refused(f"its program has {str(value)[:60]!r} for a number")


def _dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused(f"its program has {str(value)[:60]!r} as {name}")
    return value


def _check_tree(text: Any) -> None:
    """How inputs and outputs are nested: tuples, lists and dictionaries. Other types are imported by their names."""
    try:
        version, tree = json.loads(text)
    except (TypeError, ValueError) as error:
        raise Refused("the structure of its inputs is malformed") from error
    if version != 1:
        raise Refused("the structure of its inputs is of another version")
    _check_node(tree)


def _check_node(tree: Any) -> None:
    if not isinstance(tree, dict) or set(tree) != {"type", "context", "children_spec"} or tree["type"] not in TREES:
        raise Refused(f"its inputs or outputs are held by {str(tree)[:60]!r}")
    context = json.loads(tree["context"]) if isinstance(tree["context"], str) else tree["context"]
    if context is not None:
        _texts("a name", IDENTIFIER)(context)
    for child in tree["children_spec"]:
        _check_node(child)
