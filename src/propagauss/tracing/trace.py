"""nn.Module -> a functional ATen graph, with the names of its parameters and the paths of its modules.

Exported without decompositions, so that `linear`, `gelu`, `layer_norm` stay whole: the level at which rules are stated.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from propagauss.checks import kind
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian, mean_of
from propagauss.inputs import as_call
from propagauss.nodes import depends, mend_readers, module_path, op_name, reached, remember_origins
from propagauss.tracing.calls.recurrent import RECURRENT_OPS
from propagauss.tracing.checks import (
    check_dtypes,
    check_integers,
    refuse_kept_norms,
    refuse_parts_of_its_own,
    refuse_training,
)
from propagauss.tracing.exporting import Wanted, export, export_second_open, is_batched, is_sequence
from propagauss.tracing.fixed_masks import fix_masks
from propagauss.tracing.functional import functional
from propagauss.tracing.inline import inline
from propagauss.tracing.once import keep, recall
from propagauss.tracing.tidy import tidied
from propagauss.tracing.weight_norms import rows_normalised


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
    recurrent: bool = False  # has recurrent layers, of which those that anything random reaches are written out

    @property
    def batch_is_dynamic(self) -> bool:
        return bool(self.batch_symbols)

    def copy(self) -> Traced:
        """With a graph of its own, which passes may change; the values are shared."""
        graph, new = fx.Graph(), {}
        graph.output(graph.graph_copy(self.graph, new))
        names = {old.name: node.name for old, node in new.items()}
        return replace(
            self,
            graph=graph,
            constants={names[name]: value for name, value in self.constants.items()},
            parameters={names[name]: value for name, value in self.parameters.items()},
            inputs=[None if node is None else new[node] for node in self.inputs],
            outputs=[new[node] if isinstance(node, fx.Node) else node for node in self.outputs],
        )


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves of a call; a Gaussian is one leaf."""
    # the order in which a caller names them does not matter; torch.compile can sort names, but not pairs
    kwargs = {name: kwargs[name] for name in sorted(kwargs)}
    return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: isinstance(x, Gaussian))


def trace(
    model: nn.Module,
    example: Any,
    output: str | None = None,
    open_sequence: bool = False,
    random: Collection[str] | None = None,
) -> Traced:
    """Export `model` as called on `example`, with the batch (first dimension of the inputs) left open if it can be.

    With `open_sequence` so is the second dimension of token indices and of sequences of vectors. `random` are the names
    of the parameters that are random (None: any may be); recurrent layers that nothing random reaches stay whole.
    """
    leaves, spec = flatten(*as_call(example))
    means = [mean_of(leaf) for leaf in leaves]
    open_sequence = open_sequence and any(map(is_sequence, means))
    uncertain = [isinstance(leaf, Gaussian) for leaf in leaves]
    key = (id(model), *map(_form, means), *uncertain, str(spec), output, open_sequence)
    own = (*key, None if random is None else frozenset(random))  # which recurrent layers are written out depends on it
    known = recall(key, own)
    if known is not None:
        copy = known[-1].copy()
        traced = replace(copy, example=list(map(_in_place_of, means, copy.example)))
    else:
        traced = _trace(model, leaves, spec, output, open_sequence, random)
        # model and example are held, so that no other object gets their ids
        keep(own if traced.recurrent else key, lambda: (model, means, traced.copy()))
    refuse_kept_norms(traced.graph, traced.parameters, random or ())
    return traced


def _trace(
    model: nn.Module,
    leaves: list[Any],
    spec: pytree.TreeSpec,
    output: str | None,
    open_sequence: bool,
    random: Collection[str] | None,
) -> Traced:
    wrapped = Wanted(model, spec, output)
    uncertain = [isinstance(leaf, Gaussian) for leaf in leaves]
    plain = [mean_of(leaf) for leaf in leaves]
    batch = _batch_size(plain)
    check_dtypes(model, plain)
    widened = [_widen(x) if batch == 1 and is_batched(x, 1) else x for x in plain]
    size = max(batch, 2)
    program, symbols = export(wrapped, widened, size, plain, open_sequence)
    recurrent = any(n.target in RECURRENT_OPS for n in program.graph.nodes)
    wrapped.unroll = _uncertain_recurrences(program, wrapped, uncertain, random)
    if wrapped.unroll:
        program, symbols = export(wrapped, widened, size, plain, False)
        second = None if symbols else export_second_open(wrapped, plain)
        if second is not None and second[1]:
            program, symbols = second
            widened, size = plain, next(x.shape[1] for x in plain if isinstance(x, Tensor) and x.dim() == 3)

    mend_readers(program.graph)
    inline(program)
    rows_normalised(program, reached(program.graph, _user_inputs(program)))
    program = tidied(functional(program))
    graph = program.graph
    symbols = _kept(symbols, program, batch)
    constants, parameters = _constants(program, wrapped)
    refuse_parts_of_its_own(graph, constants)
    fix_masks(graph, constants)
    refuse_training(graph)
    inputs = _inputs(program)
    check_integers(graph)
    remember_origins(graph)
    results: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    user_outputs = [
        value
        for value, entry in zip(results, program.graph_signature.output_specs, strict=True)
        if entry.kind == OutputKind.USER_OUTPUT
    ]
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    return Traced(
        graph=graph,
        constants=constants,
        parameters=parameters,
        inputs=inputs,
        outputs=user_outputs,
        in_spec=spec,
        out_spec=out_spec,
        uncertain_inputs=uncertain,
        example=widened if symbols else plain,
        batch=size if symbols else batch,
        batch_symbols=symbols,
        recurrent=recurrent,
    )


def _kept(symbols: set[Any], program: ExportedProgram, batch: int) -> set[Any]:
    """Writing out changes in place may fix sizes that were open, as those of `x.unbind(1)[0].add_(y)`."""
    shapes = [getattr(n.meta["val"], "shape", ()) for n in _user_inputs(program)]
    if not symbols or any(depends(size, symbols) for shape in shapes for size in shape):
        return symbols
    if batch == 1:
        raise InputError(
            "the model changes values in place in a way that fixes its batch size: give an example of as many samples "
            "as calls will have, two or more"
        )
    return set()


def _user_inputs(program: ExportedProgram) -> list[fx.Node]:
    return [n for n in _inputs(program) if n is not None]


def _inputs(program: ExportedProgram) -> list[fx.Node | None]:
    """The placeholders of the user's inputs, in order; literals have none."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    entries = [e for e in program.graph_signature.input_specs if e.kind == InputKind.USER_INPUT]
    return [None if isinstance(e.arg, ConstantArgument) else placeholders[e.arg.name] for e in entries]


def _constants(program: ExportedProgram, model: Wanted) -> tuple[dict[str, Tensor], dict[str, str]]:
    """By placeholder: the values of parameters, buffers and constants, and the names of parameters."""
    canonical = {id(p): name for name, p in model.named_parameters()}
    constants: dict[str, Tensor] = {}
    parameters: dict[str, str] = {}
    for entry in program.graph_signature.input_specs:
        if entry.kind == InputKind.USER_INPUT:
            continue
        target = str(entry.target)
        constants[entry.arg.name] = _lookup(model, program, target, entry.arg.name)
        if entry.kind == InputKind.PARAMETER:
            # a tied parameter arrives under its last name; named_parameters() knows it by its first
            name = canonical.get(id(_attribute(model, target)), target)
            parameters[entry.arg.name] = name.removeprefix("model.")
    return constants, parameters


def _uncertain_recurrences(
    program: ExportedProgram, model: Wanted, uncertain: list[bool], random: Collection[str] | None
) -> frozenset[int]:
    """Which recurrent calls, by their number, have a random parameter or an uncertain value before them."""
    graph = program.graph
    calls = [n for n in graph.nodes if n.target in RECURRENT_OPS]
    if not calls:
        return frozenset()
    parameters = _constants(program, model)[1]
    sources = [n for n in graph.nodes if n.name in parameters and (random is None or parameters[n.name] in random)]
    sources += [n for n, u in zip(_inputs(program), uncertain, strict=True) if n is not None and u]
    found = reached(graph, sources)
    return frozenset(i for i, node in enumerate(calls) if node in found)


def _batch_size(leaves: list[Any]) -> int:
    sizes = [x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim() > 0]
    if not sizes:
        raise InputError("the example holds no tensor with a batch dimension: give [batch, ...]")
    if 0 in sizes:
        raise InputError("the example is empty: give at least one sample")
    return sizes[0]


def _form(leaf: Any) -> Any:
    """All of an input that a trace depends on: it sees no values of tensors."""
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return id(leaf)
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device


def _in_place_of(leaf: Any, other: Any) -> Any:
    """As large as another input of the same form, which may have been widened."""
    return _widen(leaf) if isinstance(leaf, Tensor) and leaf.shape != other.shape else leaf


def _widen(leaf: Tensor) -> Tensor:
    """Two copies of a single sample: a batch of one would be traced as a fixed size."""
    return torch.cat([leaf, leaf])


def _lookup(model: nn.Module, program: ExportedProgram, target: str, placeholder: str) -> Tensor:
    known = next((k for k in (program.state_dict, program.constants) if target in k), None)
    value: Any = _attribute(model, target) if known is None else known[target]
    if not isinstance(value, Tensor):
        node = next(n for n in program.graph.nodes if n.name == placeholder)
        users = [f" for {op_name(n.target)} at '{module_path(n)}'" for n in node.users]
        raise InputError(
            f"the model uses {kind(value)}{''.join(users[:1])}, and a network can hold only tensors: leave it out, or "
            "give what it makes, such as random numbers, as an input"
        )
    return value.detach()


def _attribute(model: nn.Module, target: str) -> Any:
    value: Any = model
    for part in target.split("."):
        value = getattr(value, part)
    return value
