"""nn.Module -> a functional ATen graph, with the names of its parameters and the paths of its modules.

Exported without decompositions, so that `linear`, `gelu`, `layer_norm` stay whole: the level at which rules are stated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_call
from propagauss.patterns import recognise
from propagauss.suitable import check_dtypes, check_integers, refuse_training
from propagauss.tidy import functional, quietly, tidied

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
    # the order in which a caller names them does not matter; torch.compile can sort names, but not pairs
    kwargs = {name: kwargs[name] for name in sorted(kwargs)}
    return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Gaussian))


class Wanted(nn.Module):
    """The model as a function of the flat leaves of a call, returning only the output wanted.

    What else it returns (a cache, say) may not be exportable.
    """

    def __init__(self, model: nn.Module, spec: pytree.TreeSpec, output: str | None):
        super().__init__()
        self.model = model
        self.spec = spec
        self.output = output

    def forward(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.model(*args, **kwargs)
        name = self.output or "logits"
        if isinstance(result, dict) and name in result:
            return result[name]
        if hasattr(result, name):
            return getattr(result, name)
        if self.output is not None:
            raise InputError(f"the model returns a {type(result).__name__}, which has no '{self.output}'")
        return result


def trace(model: nn.Module, example: Any, output: str | None = None, open_sequence: bool = False) -> Traced:
    """Export `model` as called on `example`, with the batch (first dimension of the inputs) left open if it can be.

    With `open_sequence` so is the second dimension of token indices and of sequences of vectors.
    """
    leaves, spec = flatten(*as_call(example))
    model = Wanted(model, spec, output)
    uncertain = [isinstance(leaf, Gaussian) for leaf in leaves]
    plain = [leaf.mean if isinstance(leaf, Gaussian) else leaf for leaf in leaves]
    batch = _batch_size(plain)
    check_dtypes(model, plain)
    widened = [_widen(x) if batch == 1 and _is_batched(x, 1) else x for x in plain]
    program, symbols = _export(model, widened, max(batch, 2), plain, open_sequence)
    program = tidied(functional(program))
    refuse_training(program.graph)
    recognise(program.graph)
    check_integers(program.graph)

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


def _export(
    model: nn.Module, leaves: list[Any], batch: int, fallback: list[Any], open_sequence: bool
) -> tuple[ExportedProgram, set[Any]]:
    """Try an open batch and sequence, then an open batch, then the example's own sizes."""
    first_try: Exception | None = None
    for sequence in (True, False) if open_sequence and any(map(_is_sequence, leaves)) else (False,):
        shapes: Any = (tuple(_open(leaf, batch, sequence) for leaf in leaves),)
        try:
            program = quietly(
                lambda s=shapes: torch.export.export(model, tuple(leaves), dynamic_shapes=s, strict=False)
            )
        except Exception as error:
            first_try = first_try or error
        else:
            return program, _batch_symbols(program)
    try:
        with torch.no_grad():
            model(*fallback)
    except Exception as error:
        raise InputError(f"the model does not run on the example: {type(error).__name__}: {error}") from error
    try:
        return quietly(lambda: torch.export.export(model, tuple(fallback), strict=False)), set()
    except Exception as error:
        raise InputError(
            f"torch.export could not trace the model ({type(error).__name__}: {_first_line(error)}); a forward that "
            "branches on tensor values or leaves PyTorch cannot be streamlined. "
            f"With an open batch dimension it said: {_first_line(first_try or error)}"
        ) from error


def _open(leaf: Any, batch: int, sequence: bool) -> dict[int, Any] | None:
    """Which dimensions of an input stay open."""
    if not _is_batched(leaf, batch):
        return None
    return {0: Dim.AUTO, 1: Dim.AUTO} if sequence and _is_sequence(leaf) else {0: Dim.AUTO}


def _is_sequence(leaf: Any) -> bool:
    """Token indices and masks `[B, T]`, or vectors `[B, T, D]`."""
    return isinstance(leaf, Tensor) and leaf.dim() == (3 if leaf.is_floating_point() else 2) and leaf.shape[1] > 1


def _batch_size(leaves: list[Any]) -> int:
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    if not sizes:
        raise InputError("the example holds no tensor with a batch dimension")
    if 0 in sizes:
        raise InputError("the example is empty: give at least one sample")
    return sizes[0]


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
