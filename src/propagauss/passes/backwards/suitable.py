"""What the backward walk cannot take, said before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from propagauss.errors import InputError, UnsupportedOpError
from propagauss.nodes import A_NUMBER, hint, makes_number, module_path, nodes_in, op_name, reached
from propagauss.passes.backwards.arguments import paths
from propagauss.passes.backwards.samples.axes import PLAIN, Axis
from propagauss.passes.refusals import DRAWS, draws, refusal
from propagauss.passes.sample_mixing import Values
from propagauss.rules.adjoints.registry import ADJOINTS, PER_SAMPLE
from propagauss.rules.facts import differentiable, is_differentiable
from propagauss.rules.registry import Signature
from propagauss.tracing.trace import Traced

MOST_ENTRIES = 8192  # of an output, for each sample


def check_draws(traced: Traced) -> None:
    for node in draws(traced):
        raise _refused(node, DRAWS)


def check_ops(traced: Traced, active: AbstractSet[fx.Node]) -> None:
    """What no engine can follow."""
    for node in traced.graph.nodes:
        why = refusal(node)
        if why is not None and any(a in active for a in node.all_input_nodes):
            raise _refused(node, why)


def _refused(node: fx.Node, why: str) -> UnsupportedOpError:
    return UnsupportedOpError(f"cannot linearise this model: {op_name(node.target)} at '{module_path(node)}' {why}")


def check_batch(traced: Traced, active: AbstractSet[fx.Node], axes: Mapping[fx.Node, Axis]) -> None:
    """Every uncertain value that depends on the inputs must have its samples in one dimension."""
    inputs = reached(traced.graph, [n for n in traced.inputs if n is not None])
    lost = next((n for n in _asked(traced, active) if n in inputs and n not in axes), None)
    if lost is not None:
        why = "takes the batch apart, or moves it where it cannot be followed"
        raise _refused(lost, f"{why}. Let the model treat all samples at once, the batch first.")


def check_numbers(traced: Traced, active: AbstractSet[fx.Node]) -> None:
    """A number has no derivative, but the model's output depends on it."""
    for node in traced.graph.nodes:
        if makes_number(node) and any(a in active for a in node.all_input_nodes):
            raise _refused(node, A_NUMBER)


def check_derivatives(traced: Traced, active: AbstractSet[fx.Node]) -> None:
    """PyTorch says that it has no derivative of an op only when it is asked for one, so those without adjoint are."""
    values, tried = Values(traced, flipped=False), set()
    for node in _asked(traced, active):
        if node.target in ADJOINTS or node.target in PER_SAMPLE or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if not is_differentiable(node.target):
            raise _without_derivative(node)
        places = [path for path, argument in paths(node) if argument in active]
        if (node.target, *places) not in tried:
            tried.add((node.target, *places))
            _try_derivative(node, places, values)


def _asked(traced: Traced, active: AbstractSet[fx.Node]) -> list[fx.Node]:
    """The uncertain values on which outputs depend other than through decisions, such as comparisons."""
    found = {n for n in traced.outputs if isinstance(n, fx.Node)}
    for node in reversed(traced.graph.nodes):
        if node in found & active:
            found.update(node.all_input_nodes)
    return [n for n in traced.graph.nodes if n in found & active]


def _try_derivative(node: fx.Node, places: list[tuple[int, ...]], values: Values) -> None:
    try:
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        _differentiate(differentiable(node.target), args, kwargs, places)
    except Exception as error:
        if "not implemented" in str(error):  # else the walk finds a way, or says what is wrong
            raise _without_derivative(node) from error


def _differentiate(op: Any, args: Any, kwargs: Any, places: list[tuple[int, ...]]) -> None:
    args = [list(a) if isinstance(a, (list, tuple)) else a for a in args]
    leaves = []
    for first, *rest in places:
        within, at = (args[first], rest[0]) if rest else (args, first)
        within[at] = within[at].detach().requires_grad_()
        leaves.append(within[at])
    with torch.enable_grad():
        results = pytree.tree_leaves(op(*args, **kwargs))
        known = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.grad(known, leaves, [torch.ones_like(r) for r in known], allow_unused=True)


def _without_derivative(node: fx.Node) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"cannot linearise this model: PyTorch has no derivative of {op_name(node.target)} at '{module_path(node)}'. "
        "Write it with ops that have one, or leave the parameters before it out of the posterior."
    )


def check_outputs(traced: Traced, active: AbstractSet[fx.Node], axes: Mapping[fx.Node, Axis]) -> None:
    """Every uncertain output must have one row for each sample."""
    for output in traced.outputs:
        if isinstance(output, fx.Node) and output in active and axes.get(output) != PLAIN:
            shape = [hint(n) for n in output.meta["val"].shape]
            raise UnsupportedOpError(
                f"cannot linearise this model: for {traced.batch} inputs its output has shape {shape}, with samples "
                "not in the first dimension, or not one row for each. Let the model return samples first, as with "
                "transpose"
            )


def check_keywords(traced: Traced, active: AbstractSet[fx.Node]) -> None:
    """Uncertain values among keyword arguments become positional ones; the walk looks for them there alone."""
    for node in traced.graph.nodes:
        if node.op != "call_function" or not any(a in active for a in nodes_in(node.kwargs)):
            continue
        signature = Signature(node.target)
        given = signature.named(node.args, node.kwargs)
        node.args = tuple(given[name] for name in signature.positional)
        node.kwargs = {name: given[name] for name in signature.keywords if name in node.kwargs}
        if any(a in active for a in nodes_in(node.kwargs)):
            raise _refused(node, "takes an uncertain value by keyword")


def check_size(output: fx.Node, entries: int, widest: int, chosen: bool = False) -> None:
    """One sensitivity for every entry (that was chosen): refuse what would take forever, before memory is gone."""
    if entries <= MOST_ENTRIES:
        return
    gigabytes = entries * (entries + widest) * output.meta["val"].dtype.itemsize / 2**30
    count = f"outputs= chooses {entries:,} entries" if chosen else f"the output has {entries:,} entries"
    fewer = "choose fewer" if chosen else "choose the largest ones with outputs=5 or some by index with outputs=[0, 4]"
    raise InputError(
        f"{count} for each sample, and linearise sends the sensitivity of every one of "
        f"them through the model: some {2 * entries:,} forward passes and {gigabytes:,.0f} GiB for one sample. "
        f"It takes at most {MOST_ENTRIES:,}: {fewer}, let the model return fewer (some classes, pixels or tokens), or "
        "use propagauss.streamline, whose cost does not grow with the outputs."
    )
