"""The words of a rewriting: the plan, and the error for what could not be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from torch import Tensor, fx

from propagauss.errors import UnsupportedOpError
from propagauss.network.plan import Plan, Step
from propagauss.nodes import depends, hint, module_path, op_name
from propagauss.passes.rewriting.new_graph import NewGraph
from propagauss.posteriors.diagonal import DiagonalPosterior

MEAN_ALONE = "at the mean"  # in place of a rule
MIXED = "samples of the batch, which share the weights, count as independent"
MIXES = "mixes the samples of a batch, or moves the batch away from the front"
MOVES = "moves the batch away from the front, or mixes samples in a way that the example does not show"

Notes = Sequence[tuple[fx.Node, Step]]  # what was done at each op, in order


def plan_of(new: NewGraph, notes: Notes, left_out: AbstractSet[fx.Node]) -> Plan:
    """Every op on an uncertain value, and what became of the random parameters.

    `left_out` are parameters of the full structure that were too large to be followed to all their uses.
    """
    live = set(new.graph.nodes)
    steps = tuple(step for node, step in notes if new.env[node] in live)
    rewritten = {new.env[node] for node, _ in notes}
    own = [n for n in new.env if n.op == "call_function" and n not in new.random]
    untouched = sum(new.env[n] in live and new.env[n] not in rewritten for n in own)
    names = new.traced.parameters
    used = {names[n.name] for n in new.random if n.name in names and n.users}
    idle = {names[n.name] for n in _idle_parameters(new)}
    unused = sorted((set() if new.posterior is None else set(new.posterior.names)) - used)
    if unused:
        warnings.warn(f"the model never uses these parameters of the posterior: {', '.join(unused)}", stacklevel=6)
    remarks = []
    if idle:
        remarks.append(f"no effect, as attention fixes queries and keys at their means: {', '.join(sorted(idle))}")
    apart = sorted(names[n.name] for n in (left_out if new.options.full else _used_apart(new)))
    if apart:
        remarks.append(f"used at several places, which count as independent: {', '.join(apart)}")
    joint = [n for n in sorted(new.alone) if not isinstance(new.posterior, DiagonalPosterior)]
    if joint:
        remarks.append(f"outside a layer, so by their variances alone, without covariances: {', '.join(joint)}")
    return Plan(steps, untouched, tuple(sorted(used - idle)), tuple(remarks))


def _used_apart(new: NewGraph) -> set[fx.Node]:
    """Random parameters that the diagonal structure uses at several places, as if they were several parameters."""
    leaves = [n for n in new.random if n.name in new.traced.parameters]
    return {n for n in leaves if sum(user in new.wanted for user in n.users) > 1}


def _idle_parameters(new: NewGraph) -> list[fx.Node]:
    """Random parameters whose variance reaches nothing."""
    leaves = [n for n in new.random if n.name in new.traced.parameters and n.users]
    return [n for n in leaves if not any(user in new.wanted for user in n.users)]


def step_of(new: NewGraph, node: fx.Node, rule: str, note: str) -> Step:
    """The line of the plan for one op."""
    value = node.meta.get("val")
    shape: tuple[int | str, ...] = ()
    if isinstance(value, Tensor):
        shape = tuple("B" if depends(s, new.traced.batch_symbols) else hint(s) for s in value.shape)
    elif isinstance(value, (tuple, list)):
        shape = (f"{len(value)} parts",)
    structure = "none" if rule == MEAN_ALONE else new.options.covariance
    return Step(op_name(node.target), module_path(node), rule, structure, shape, note)


def warn_of_mixing(found: Sequence[fx.Node]) -> None:
    """One warning for all ops that take uncertain samples of a batch together."""
    if found:
        where = ", ".join(dict.fromkeys(f"{op_name(n.target)} at '{module_path(n)}'" for n in found))
        warnings.warn(
            f"the samples of a batch depend on each other, by {where}: they share the random weights and so move "
            "together, but count as independent, so that the variances may be far from the truth. Let the model treat "
            "samples one by one; if an input without a batch dimension is as long as the batch, give an example of "
            "another batch size.",
            stacklevel=5,
        )


def unsupported(found: Sequence[tuple[fx.Node, str]]) -> UnsupportedOpError:
    """One error for all that cannot be rewritten, and what to do about it."""
    lines = [f"  {op_name(n.target)} at '{module_path(n)}' {why}" for n, why in dict(found).items()]
    remedies = []
    if any(why == MOVES for _, why in found):
        remedies.append("Leave the batch in front; covariance='diagonal' has no such limit.")
    if any(why == MIXES for _, why in found):
        remedies.append(
            "What the model returns for a sample depends on the others: let it treat samples one by one. "
            "covariance='diagonal' counts them as independent, though they share the weights, and warns of it."
        )
    if any("draws" in why for _, why in found):
        remedies.append("Let the model return what it draws from instead.")
    if any("no rule" in why for _, why in found):
        remedies.append(
            "Register a rule with @propagauss.rule(torch.ops....) (see the how-to on custom rules), or leave the "
            "parameters before these ops out of the posterior."
        )
    return UnsupportedOpError("\n".join(["cannot streamline this model:", *lines, *remedies]))
