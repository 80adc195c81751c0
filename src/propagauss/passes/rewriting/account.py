"""The words of a rewriting: the plan, and the error for what could not be rewritten."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import fx

from propagauss.errors import UnsupportedOpError
from propagauss.network.plan import Plan
from propagauss.nodes import module_path, op_name
from propagauss.posteriors.diagonal import DiagonalPosterior

if TYPE_CHECKING:
    from propagauss.passes.rewriting.rewrite import Rewriter


def plan_of(rewriter: Rewriter) -> Plan:
    """Every op on an uncertain value, and what became of the random parameters."""
    live = set(rewriter.graph.nodes)
    steps = tuple(step for node, step in rewriter.steps if rewriter.env[node] in live)
    rewritten = {rewriter.env[node] for node, _ in rewriter.steps}
    own = [n for n in rewriter.env if n.op == "call_function" and n not in rewriter.random]
    untouched = sum(rewriter.env[n] in live and rewriter.env[n] not in rewritten for n in own)
    names = rewriter.traced.parameters
    used = {names[n.name] for n in rewriter.random if n.name in names and n.users}
    idle = {names[n.name] for n in _idle_parameters(rewriter)}
    unused = sorted(rewriter.names - used)
    if unused:
        warnings.warn(f"the model never uses these parameters of the posterior: {', '.join(unused)}", stacklevel=5)
    notes = []
    if idle:
        notes.append(f"no effect, as attention takes queries and keys by their mean: {', '.join(sorted(idle))}")
    apart = sorted(names[n.name] for n in _taken_apart(rewriter))
    if apart:
        notes.append(f"used at several places, which count as independent: {', '.join(apart)}")
    joint = [n for n in sorted(rewriter.alone) if not isinstance(rewriter.posterior, DiagonalPosterior)]
    if joint:
        notes.append(f"outside a layer, so by their variances alone, without covariances: {', '.join(joint)}")
    return Plan(steps, untouched, tuple(sorted(used - idle)), tuple(notes))


def _taken_apart(rewriter: Rewriter) -> set[fx.Node]:
    """Random parameters that are used at several places, as if they were several parameters."""
    if rewriter.options.full:
        return rewriter.joint.left_out
    leaves = [n for n in rewriter.random if n.name in rewriter.traced.parameters]
    return {n for n in leaves if sum(user in rewriter.wanted for user in n.users) > 1}


def _idle_parameters(rewriter: Rewriter) -> list[fx.Node]:
    """Random parameters whose variance reaches nothing."""
    leaves = [n for n in rewriter.random if n.name in rewriter.traced.parameters and n.users]
    return [n for n in leaves if not any(user in rewriter.wanted for user in n.users)]


def unsupported(found: Sequence[tuple[fx.Node, str]]) -> UnsupportedOpError:
    """One error for all that cannot be rewritten, and what to do about it."""
    lines = [f"  {op_name(n.target)} at '{module_path(n)}' {why}" for n, why in dict(found).items()]
    remedies = []
    if any("the batch" in why for _, why in found):
        remedies.append("covariance='diagonal' has no such limit.")
    if any("draws" in why for _, why in found):
        remedies.append("Let the model return what it draws from instead.")
    if any("no rule" in why for _, why in found):
        remedies.append(
            "Register a rule with @propagauss.rule(torch.ops....) (see the how-to on custom rules), or leave the "
            "parameters before these ops out of the posterior."
        )
    return UnsupportedOpError("\n".join(["cannot streamline this model:", *lines, *remedies]))
