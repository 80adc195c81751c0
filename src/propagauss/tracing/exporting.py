"""torch.export, tried with open sizes first, on copies of the example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import config
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from propagauss.alone import ALONE, quiet
from propagauss.checks import kind
from propagauss.errors import InputError, PropagaussError
from propagauss.inputs import check_eval, explained
from propagauss.tracing.calls.plain_calls import PlainCalls
from propagauss.tracing.own_thread import own_thread

_REMEDY = (
    "This is a limit of torch.export. What helps: wrap the model in a module that leaves out whatever branches on "
    "tensor values or leaves PyTorch, and that returns only tensors; for Hugging Face models "
    'attn_implementation="eager" or "sdpa", use_cache=False and return_dict=True; or streamline only the part of the '
    "model that can be exported, on the features that the rest computes."
)


class Wanted(nn.Module):
    """The model as a function of the flat leaves of a call, returning only the output wanted.

    What else it returns (a cache, say) may not be exportable. `unroll` says which recurrent calls, in the order in
    which they are made, are written out step by step.
    """

    def __init__(self, model: nn.Module, spec: pytree.TreeSpec, output: str | None):
        super().__init__()
        self.model = model
        self.spec = spec
        self.output = output
        self.unroll: frozenset[int] = frozenset()

    def forward(self, *leaves: Any) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with PlainCalls(self.unroll):
            result = self.model(*args, **kwargs)
        name = self.output or "logits"
        if isinstance(result, dict) and name in result:
            return result[name]
        if hasattr(result, name):
            return getattr(result, name)
        if self.output is not None:
            what = "a tensor" if isinstance(result, Tensor) else kind(result)
            raise InputError(
                f"the model returns {what}, which has no '{self.output}': name one of its fields, or leave out output="
            )
        return result


def export(
    model: Wanted, leaves: list[Any], batch: int, fallback: list[Any], open_sequence: bool
) -> tuple[ExportedProgram, set[Any]]:
    """Try an open batch and sequence, then an open batch, then the example's own sizes.

    Every try gets copies: torch marks the tensors whose sizes it was told to leave open, and a model may change its
    input. Returns the program and the symbols of the batch, none if its size is fixed.
    """
    first_try: Exception | None = None
    for sequence in (True, False) if open_sequence else (False,):
        shapes = tuple(_open(leaf, batch, sequence) for leaf in leaves)
        try:
            program = _run(model, leaves, shapes)
        except PropagaussError:
            raise
        except Exception as error:
            first_try = first_try or error
        else:
            return program, _symbols(program, 0)
    _try_out(model, fallback)
    try:
        return _run(model, fallback, None), set()
    except Exception as error:
        raise InputError(
            f"torch.export could not trace the model: {type(error).__name__}: {first_line(error)}\n{_REMEDY}\n"
            f"With an open batch dimension torch.export said: {first_line(first_try or error)}"
        ) from error


def export_second_open(model: Wanted, leaves: list[Any]) -> tuple[ExportedProgram, set[Any]] | None:
    """With the second dimension of sequences `[T, B, D]` open instead of the first; None if that cannot be."""
    sequences = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 3 and leaf.shape[1] > 1]
    if not sequences or len({leaf.shape[1] for leaf in sequences}) > 1:
        return None
    shapes = tuple({1: Dim.AUTO} if any(leaf is s for s in sequences) else None for leaf in leaves)
    try:
        program = _run(model, leaves, shapes)
    except Exception:  # the sizes of the example then stay fixed
        return None
    return program, _symbols(program, 1)


def quietly(run: Callable[[], ExportedProgram]) -> ExportedProgram:
    """Without PyTorch's logs, and without what takes time and is read by nobody.

    That is the stack of Python at every op, and the code of the graph, which each pass of torch.export would compile.
    """
    with quiet(), torch.no_grad(), no_stacks(), _use_lazy_graph_module(True):
        return run()


@contextmanager
def no_stacks() -> Iterator[None]:
    """For what PyTorch traces within it."""
    before = getattr(config, "do_not_emit_stack_traces", False)  # not every version of torch has it
    config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


def _run(model: Wanted, leaves: list[Any], shapes: tuple[Any, ...] | None) -> ExportedProgram:
    copies = tuple(_copied(leaf) for leaf in leaves)
    dynamic: Any = None if shapes is None else (shapes,)
    with ALONE, own_thread(model):
        return quietly(lambda: torch.export.export(model, copies, dynamic_shapes=dynamic, strict=False))


def _try_out(model: Wanted, leaves: list[Any]) -> None:
    """A model that does not run at all needs another message than one that cannot be exported."""
    check_eval(model.model)  # running it would change its statistics
    with torch.no_grad(), explained(model.model, leaves, "the example: "):
        model(*(_copied(leaf) for leaf in leaves))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _open(leaf: Any, batch: int, sequence: bool) -> dict[int, Any] | None:
    """Which dimensions of an input stay open."""
    if not is_batched(leaf, batch):
        return None
    return {0: Dim.AUTO, 1: Dim.AUTO} if sequence and is_sequence(leaf) else {0: Dim.AUTO}


def is_batched(leaf: Any, batch: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch


def is_sequence(leaf: Any) -> bool:
    """Token indices and masks `[B, T]`, or vectors `[B, T, D]`."""
    return isinstance(leaf, Tensor) and leaf.dim() == (3 if leaf.is_floating_point() else 2) and leaf.shape[1] > 1


def _symbols(program: ExportedProgram, dim: int) -> set[Any]:
    """What the sizes of the inputs along a dimension are made of."""
    symbols: set[Any] = set()
    for entry in program.graph_signature.input_specs:
        if entry.kind == InputKind.USER_INPUT and not isinstance(entry.arg, ConstantArgument):
            node = next(n for n in program.graph.nodes if n.name == entry.arg.name)
            value = node.meta.get("val")
            size: Any = value.shape[dim] if isinstance(value, Tensor) and value.dim() > dim else None
            if isinstance(size, torch.SymInt):
                symbols |= size.node.expr.free_symbols
    return symbols


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
