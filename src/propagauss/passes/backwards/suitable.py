"""What the backward walk cannot take, said before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from torch import fx

from propagauss.errors import InputError, UnsupportedOpError
from propagauss.nodes import A_NUMBER, hint, makes_number, module_path, nodes_in, op_name, reached
from propagauss.passes.backwards.samples.axes import PLAIN, Axis
from propagauss.rules.registry import Signature
from propagauss.tracing.trace import Traced

MOST_ENTRIES = 8192  # of an output, for each sample


def check_batch(traced: Traced, active: AbstractSet[fx.Node], axes: Mapping[fx.Node, Axis]) -> None:
    """Every uncertain value that depends on the inputs must have its samples in one dimension."""
    inputs = reached(traced.graph, [n for n in traced.inputs if n is not None])
    lost = next((n for n in traced.graph.nodes if n in active & inputs and n not in axes), None)
    if lost is not None:
        raise UnsupportedOpError(
            f"cannot linearise this model: {op_name(lost.target)} at '{module_path(lost)}' takes the batch apart, "
            "or moves it where it cannot be followed. Let the model treat all samples at once, the batch first."
        )


def check_numbers(traced: Traced, active: AbstractSet[fx.Node]) -> None:
    """A number has no derivative, but the model's output depends on it."""
    for node in traced.graph.nodes:
        if makes_number(node) and any(a in active for a in node.all_input_nodes):
            where = f"{op_name(node.target)} at '{module_path(node)}'"
            raise UnsupportedOpError(f"cannot linearise this model: {where} {A_NUMBER}")


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
            where = f"{op_name(node.target)} at '{module_path(node)}'"
            raise UnsupportedOpError(f"cannot linearise this model: {where} takes an uncertain value by keyword")


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
