"""`streamline(..., check=True)`: are the standard deviations of the size that the model's own derivatives give?

To first order a draw `δ` from the posterior moves the output by `J δ`, a Jacobian product that costs about two forward
passes. The mean of a few squares `(J δ)²` estimates the variances `diag(J Σ Jᵀ)` without any assumption of
independence; averaged over outputs and samples, sixteen draws settle a factor of three.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, fx

from propagauss.gaussian import Gaussian
from propagauss.network.streamlined import Streamlined
from propagauss.nodes import is_assertion, is_custom, is_float, op_name
from propagauss.posteriors.base import Posterior
from propagauss.rules.facts import differentiable
from propagauss.tracing.trace import Traced

DRAWS = 16
OFF_BY = 3.0


class OnTensors(fx.Interpreter):
    """Runs a traced graph with ops that can be differentiated, given the values of its placeholders."""

    def __init__(self, graph: fx.Graph, values: dict[str, Any]):
        super().__init__(torch.nn.Module(), graph=graph)
        self.values = values

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.values[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_assertion(target):
            return None
        return super().call_function(differentiable(target), args, kwargs)


def check_first_order(net: Streamlined, traced: Traced, posterior: Posterior | None, example: list[Any]) -> None:
    """Warn about every output whose standard deviations are off by more than a factor of three on the example.

    `example` holds the flat inputs, uncertain ones as Gaussians.
    """
    custom = sorted({op_name(n.target) for n in traced.graph.nodes if is_custom(n.target)})
    if custom:
        warnings.warn(f"not checked: PyTorch has no forward derivative of {', '.join(custom)}", stacklevel=4)
        return
    with torch.no_grad():
        given = net.outputs([leaf for leaf, node in zip(example, traced.inputs, strict=True) if node is not None])
        expected = first_order_variances(traced, posterior, example)
    for i, (g, truth) in enumerate(zip(given, expected, strict=True)):
        if not isinstance(g, Gaussian) or truth is None:
            continue
        ours, theirs = float(g.variance.mean()), float(truth.mean())
        ratio = (ours / theirs) ** 0.5 if theirs > 0 else float("inf") if ours > 0 else 1.0
        if not 1 / OFF_BY <= ratio <= OFF_BY:
            which = f" {i}" if len(given) > 1 else ""
            warnings.warn(
                f"the standard deviations of output{which} are about {ratio:.2g} times those of the model's own "
                "derivatives on the example: values that move together count as independent in "
                f"covariance={g.structure!r} (net.plan says where). Do not trust their size or their ranking: use "
                "pg.linearise, which is exact to first order, or make fewer layers random. "
                "pg.tasks.fidelity(net, model, posterior, inputs) says which parameters lose most.",
                stacklevel=4,
            )


def first_order_variances(
    traced: Traced, posterior: Posterior | None, example: list[Any], draws: int = DRAWS
) -> list[Tensor | None]:
    """An estimate of `diag(J Σ Jᵀ)` for every output that is a floating-point tensor."""
    generator = torch.Generator().manual_seed(0)
    deviations = {} if posterior is None else posterior.sample(draws, generator=generator)
    moving: dict[str, Tensor] = {}  # placeholder -> deviations [draws, *shape]
    for placeholder, name in traced.parameters.items():
        if name in deviations:
            moving[placeholder] = deviations[name]
    values: dict[str, Any] = dict(traced.constants)
    for node, leaf in zip(traced.inputs, example, strict=True):
        if node is not None:
            values[node.name] = leaf.mean if isinstance(leaf, Gaussian) else leaf
            if isinstance(leaf, Gaussian):
                moving[node.name] = leaf.sample((draws,), generator=generator) - leaf.mean
    wanted = [o for o in traced.outputs if isinstance(o, fx.Node) and is_float(o)]
    names = list(moving)

    def outputs(*at: Tensor) -> tuple[Tensor, ...]:
        runner = OnTensors(traced.graph, values | dict(zip(names, at, strict=True)))
        results = runner.run(enable_io_processing=False)
        by_node = dict(zip(_returned(traced.graph), results, strict=True))
        return tuple(by_node[o] for o in wanted)

    totals = [torch.zeros(()) for _ in wanted]
    for i in range(draws if moving else 0):
        at = tuple(values[n] for n in names)
        moved = torch.func.jvp(outputs, at, tuple(moving[n][i].to(values[n].dtype) for n in names))[1]
        totals = [t + m.square() / draws for t, m in zip(totals, moved, strict=True)]
    found = dict(zip(wanted, totals, strict=True))
    return [found.get(o) if isinstance(o, fx.Node) else None for o in traced.outputs]


def _returned(graph: fx.Graph) -> list[Any]:
    results: Any = next(n for n in graph.nodes if n.op == "output").args[0]
    return list(results)
