"""nn.Module -> a functional ATen graph, with the names of its parameters and the paths of its modules.

Exported without decompositions, so that `linear`, `gelu`, `layer_norm` stay whole: the level at which rules are stated.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_call
from propagauss.patterns import recognise

aten = torch.ops.aten


@dataclass
class Traced:
    """A model as a graph. `inputs` are the flat user inputs, in order; literal inputs (None, numbers) have no node."""

    graph: fx.Graph
    constants: dict[str, Tensor]  # placeholder name -> parameter, buffer or tensor constant
    parameters: dict[str, str]  # placeholder name -> name in named_parameters()
    inputs: list[fx.Node | None]
    outputs: list[Any]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    uncertain_inputs: list[bool]
    example: list[Any]  # flat, plain values
    batch: int
    batch_symbols: set[Any] = field(default_factory=set)

    @property
    def batch_is_dynamic(self) -> bool:
        return bool(self.batch_symbols)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of a call; a Gaussian is one leaf."""
    return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Gaussian))


class Wanted(nn.Module):
    """The model, returning only the output wanted: what else it returns (a cache, say) may not be exportable."""

    def __init__(self, model: nn.Module, output: str | None):
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        name = self.output or "logits"
        if isinstance(result, dict) and name in result:
            return result[name]
        if hasattr(result, name):
            return getattr(result, name)
        if self.output is not None:
            raise InputError(f"the model returns a {type(result).__name__}, which has no '{self.output}'")
        return result


def trace(model: nn.Module, example: Any, output: str | None = None) -> Traced:
    """Export `model` as called on `example`, with the batch (first dimension of the inputs) left open if it can be."""
    model = Wanted(model, output)
    leaves, spec = flatten(*as_call(example))
    uncertain = [isinstance(leaf, Gaussian) for leaf in leaves]
    plain = [leaf.mean if isinstance(leaf, Gaussian) else leaf for leaf in leaves]
    batch = _batch_size(plain)
    _check_dtypes(model, plain)
    widened = [_widen(x) if batch == 1 and _is_batched(x, 1) else x for x in plain]
    program, symbols = _export(model, widened, spec, max(batch, 2), fallback=plain)
    program = _tidied(_functional(program))
    _refuse_training(program)
    recognise(program.graph)
    _check_integers(program.graph)

    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    canonical = {id(p): name for name, p in model.named_parameters()}
    constants: dict[str, Tensor] = {}
    parameters: dict[str, str] = {}
    inputs: list[fx.Node | None] = []
    for entry in program.graph_signature.input_specs:
        if entry.kind == InputKind.USER_INPUT:
            literal = isinstance(entry.arg, ConstantArgument)
            inputs.append(None if literal else placeholders[entry.arg.name])
            continue
        target = str(entry.target)
        constants[entry.arg.name] = _lookup(model, program, target)
        if entry.kind == InputKind.PARAMETER:
            # a tied parameter arrives under its last name; named_parameters() knows it by its first
            name = canonical.get(id(_attribute(model, target)), target)
            parameters[entry.arg.name] = name.removeprefix("model.")
    results: Any = next(n for n in program.graph.nodes if n.op == "output").args[0]
    user_outputs = [
        value
        for value, entry in zip(results, program.graph_signature.output_specs, strict=True)
        if entry.kind == OutputKind.USER_OUTPUT
    ]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return Traced(
        graph=program.graph,
        constants=constants,
        parameters=parameters,
        inputs=inputs,
        outputs=user_outputs,
        in_spec=spec,
        out_spec=out_spec,
        uncertain_inputs=uncertain,
        example=widened if symbols else plain,
        batch=max(batch, 2) if symbols else batch,
        batch_symbols=symbols,
    )


def module_path(node: fx.Node) -> str:
    """Dotted path of the module that ran the node; `(model)` for the outermost one."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("model").removeprefix(".") or "(model)"


def op_name(target: Any) -> str:
    """`aten.relu` for `torch.ops.aten.relu.default`, with the overload where it is not the default one."""
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    return name.removesuffix(".default")


def _export(
    model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec, batch: int, fallback: list[Any]
) -> tuple[ExportedProgram, set[Any]]:
    shapes: Any = ShapesCollection()
    for leaf in leaves:
        if _is_batched(leaf, batch):
            shapes[leaf] = {0: Dim.AUTO}
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    try:
        program = _quietly(lambda: torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False))
    except Exception as error:
        first_try = error
    else:
        return program, _batch_symbols(program)
    args, kwargs = pytree.tree_unflatten(fallback, spec)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise InputError(f"the model does not run on the example: {type(error).__name__}: {error}") from error
    try:
        return _quietly(lambda: torch.export.export(model, args, kwargs, strict=False)), set()
    except Exception as error:
        raise InputError(
            f"torch.export could not trace the model ({type(error).__name__}: {_first_line(error)}); a forward that "
            "branches on tensor values or leaves PyTorch cannot be streamlined. "
            f"With an open batch dimension it said: {_first_line(first_try)}"
        ) from error


def _quietly(run: Callable[[], ExportedProgram]) -> ExportedProgram:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return run()


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Replace in-place ops. On a value without views the plain op does; otherwise PyTorch functionalises the graph."""
    mutable = [n for n in program.graph.nodes if _is_mutable(n.target)]
    if not mutable:
        return program
    if not all(_is_private(n) for n in mutable):
        return _quietly(lambda: program.run_decompositions({}))
    graph = program.graph
    for node in mutable:
        plain = _out_of_place(node.target)
        assert plain is not None
        with graph.inserting_before(node):
            new = graph.call_function(plain, node.args, node.kwargs)
        new.meta = dict(node.meta)
        later = set(_after(node))
        node.args[0].replace_all_uses_with(new, delete_user_cb=lambda user, later=later: user in later)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return program


def _tidied(program: ExportedProgram) -> ExportedProgram:
    """Undo what functionalised indexing such as `x[:, 0] += 1` leaves behind.

    That is `x[:]`, plain copies, and writes to a part of a tensor, which become a concatenation. Concatenations with
    nothing go, too.
    """
    graph = program.graph
    for node in list(graph.nodes):
        new = None
        if node.target == aten.copy.default and _alike(node, node.args[1]):
            new = node.args[1]
        elif node.target == aten.cat.default:
            new = _only_part(node)
        elif node.target == aten.slice.Tensor:
            new = node.args[0] if _is_whole(*node.args[1:]) else None
        elif node.target == aten.slice_scatter.default:
            new = node.args[1] if _is_whole(*node.args[2:]) else _spliced(graph, node, *node.args)
        elif node.target == aten.select_scatter.default:
            base, source, dim, index = node.args
            with graph.inserting_before(node):
                row = _call(graph, node, aten.unsqueeze.default, source, dim)
            new = _spliced(graph, node, base, row, dim, index, index + 1 or sys.maxsize)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    return program


def _only_part(node: fx.Node) -> fx.Node | None:
    """The single part of a concatenation that is not empty (a fresh cache is prepended as an empty tensor)."""
    parts: Any = node.args[0]
    filled = [p for p in parts if 0 not in p.meta["val"].shape]
    return filled[0] if len(filled) == 1 and len(parts) > 1 else None


def _is_whole(dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> bool:
    return start in (0, None) and step == 1 and (end is None or (isinstance(end, int) and end == sys.maxsize))


def _spliced(
    graph: fx.Graph,
    at: fx.Node,
    base: fx.Node,
    part: fx.Node,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> fx.Node | None:
    """`base` with the entries from `start` to `end` replaced by `part`, as a concatenation."""
    if step != 1:
        return None
    with graph.inserting_before(at):
        pieces = [part]
        if start not in (0, None):
            pieces.insert(0, _call(graph, at, aten.slice.Tensor, base, dim, 0, start))
        if end is not None and end != sys.maxsize:
            pieces.append(_call(graph, at, aten.slice.Tensor, base, dim, end, sys.maxsize))
        return _call(graph, at, aten.cat.default, pieces, dim) if len(pieces) > 1 else part


def _call(graph: fx.Graph, like: fx.Node, op: Any, *args: Any) -> fx.Node:
    """A new op at the place of `like`, with its result on the fake values of the arguments."""
    node = graph.call_function(op, args)
    node.meta = dict(like.meta)
    node.meta["val"] = op(*map_arg(args, lambda a: a.meta["val"]))
    return node


def _alike(a: fx.Node, b: fx.Node) -> bool:
    return a.meta["val"].shape == b.meta["val"].shape and a.meta["val"].dtype == b.meta["val"].dtype


def _is_mutable(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _out_of_place(target: Any) -> torch._ops.OpOverload | None:
    packet = getattr(aten, target._schema.name.split("::")[1].removesuffix("_"), None)
    overload = getattr(packet, target._overloadname, None)
    return None if overload is None or overload is target else overload


def _is_private(node: fx.Node) -> bool:
    """Whether the value changed in place is an intermediate result that shares its memory with no other value."""
    changed = node.args[0] if node.args else None
    if not isinstance(changed, fx.Node) or changed.op != "call_function" or _out_of_place(node.target) is None:
        return False
    relatives = [changed, *changed.users, *node.users]
    return not any(_is_view(n.target) for n in relatives if n.op == "call_function" and n is not node)


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True  # operator.getitem and the like may hand on views
    return any(a.alias_info is not None and not a.alias_info.is_write for a in target._schema.arguments)


def _after(node: fx.Node) -> list[fx.Node]:
    found, current = [], node.next
    while current.op != "root":
        found.append(current)
        current = current.next
    return found


_TRAINING_FLAG = {
    "aten::dropout": 2,
    "aten::feature_dropout": 2,
    "aten::alpha_dropout": 2,
    "aten::feature_alpha_dropout": 2,
    "aten::batch_norm": 5,
    "aten::rrelu": 3,
}


_TRAINING_OPS = {
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_functional",
    "aten::native_dropout",
    "aten::rrelu_with_noise",
}
_NO_STATISTICS = {aten._native_batch_norm_legit.no_stats}


def _refuse_training(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        at = _TRAINING_FLAG.get(name)
        active = at is not None and len(node.args) > at and bool(node.args[at])
        if "dropout" in name and active:
            active = node.args[1] > 0
        if ("batch_norm" in name and active and node.args[3] is None) or node.target in _NO_STATISTICS:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' has no running statistics and normalises by those of "
                "the batch, so its samples are not independent: train with track_running_stats=True"
            )
        if active or name in _TRAINING_OPS:
            raise InputError(
                f"{op_name(node.target)} at '{module_path(node)}' is in training mode, where the output is random or "
                "changes the model: call model.eval() first"
            )


def _batch_size(leaves: list[Any]) -> int:
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    if not sizes:
        raise InputError("the example holds no tensor with a batch dimension")
    if 0 in sizes:
        raise InputError("the example is empty: give at least one sample")
    return sizes[0]


def _check_dtypes(model: nn.Module, leaves: list[Any]) -> None:
    """Tracing does not notice when the input and the weights have different precisions."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and len(kinds) == 1 and leaf.dtype not in kinds:
            raise InputError(
                f"input {i} of the example is {leaf.dtype}, the model {kinds.pop()}: convert one with .to()"
            )


def _check_integers(graph: fx.Graph) -> None:
    """Tracing does not notice either when integers go where weights are multiplied."""
    for node in graph.nodes:
        if node.target in (aten.linear.default, aten.addmm.default, aten.conv2d.default):
            x: Any = node.args[1] if node.target == aten.addmm.default else node.args[0]
            if not x.meta["val"].is_floating_point():
                raise InputError(
                    f"the example is {x.meta['val'].dtype} where {op_name(node.target)} at '{module_path(node)}' "
                    "multiplies it with weights: convert it to the dtype of the model"
                )


def _is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def _widen(leaf: Tensor) -> Tensor:
    """Two copies of a single sample: a batch of one would be traced as a fixed size."""
    return torch.cat([leaf, leaf])


def _batch_symbols(program: ExportedProgram) -> set[Any]:
    symbols: set[Any] = set()
    for entry in program.graph_signature.input_specs:
        if entry.kind == InputKind.USER_INPUT and not isinstance(entry.arg, ConstantArgument):
            node = next(n for n in program.graph.nodes if n.name == entry.arg.name)
            value = node.meta.get("val")
            size: Any = value.shape[0] if isinstance(value, Tensor) and value.dim() else None
            if isinstance(size, torch.SymInt):
                symbols |= size.node.expr.free_symbols
    return symbols


def _lookup(model: nn.Module, program: ExportedProgram, target: str) -> Tensor:
    if target in program.state_dict:
        return program.state_dict[target].detach()
    if target in program.constants:
        return program.constants[target].detach()  # type: ignore[union-attr]
    return _attribute(model, target).detach()


def _attribute(model: nn.Module, target: str) -> Any:
    value: Any = model
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
