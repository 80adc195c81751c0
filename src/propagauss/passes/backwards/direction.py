"""A check of the backward walk where sizes are fixed, so that shapes do not say which dimension counts samples.

With the covariance `δ δᵀ` of a single direction `δ` in the space of parameters, the variances are `(J δ)²`. A forward
derivative gives the same numbers without any assumption about samples.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from propagauss.errors import UnsupportedOpError
from propagauss.gaussian import Gaussian
from propagauss.passes.backwards.choice import Choice
from propagauss.passes.backwards.sweep import Sweep
from propagauss.passes.check import OnTensors
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.tracing.trace import Traced

TOLERANCE = 1e-2  # of the largest standard deviation


def check_one_direction(traced: Traced, posterior: Posterior, choice: Choice | None = None) -> None:
    """Raise if the sensitivities are not those of the model, on the example."""
    generator = torch.Generator().manual_seed(0)
    values = {n: traced.constants[p] for p, n in traced.parameters.items() if n in posterior.names}
    along = {n: torch.randn(v.shape, generator=generator).to(v) * (v.abs().mean() + 1e-3) for n, v in values.items()}
    probe = LowRankPosterior(
        {n: torch.zeros_like(v) for n, v in values.items()}, {n: d[None] for n, d in along.items()}
    )
    net = Sweep(traced, probe.bind(values), False, choice).run()
    with torch.no_grad():
        found = net.outputs(_leaves(traced))
    for given, moved in zip(found, _moved(traced, along), strict=True):
        if moved is None or not isinstance(given, Gaussian):
            continue
        variance = given.variance
        if given.chosen is not None:
            variance, moved = given.chosen.covariance, moved.gather(-1, given.chosen.index)
        difference = (variance.sqrt() - moved.abs()).abs().max()
        if difference > TOLERANCE * moved.abs().max():
            raise UnsupportedOpError(
                "cannot linearise this model: torch.export fixes its batch size, and where its values have their "
                "samples could not be told. Avoid Python numbers made of the batch size (len(x), int(x.shape[0])) and "
                "loops over samples."
            )


def _leaves(traced: Traced) -> list[Tensor | Gaussian]:
    entries = zip(traced.inputs, traced.example, traced.uncertain_inputs, strict=True)
    return [Gaussian.diagonal(v, torch.zeros_like(v)) if u else v for node, v, u in entries if node is not None]


def _moved(traced: Traced, along: dict[str, Tensor]) -> list[Tensor | None]:
    """`J δ` for every output that is a floating-point tensor."""
    values: dict[str, Tensor] = dict(traced.constants)
    values |= {n.name: v for n, v in zip(traced.inputs, traced.example, strict=True) if n is not None}
    names = [p for p, n in traced.parameters.items() if n in along]

    def outputs(*at: Tensor) -> tuple[Tensor, ...]:
        found = OnTensors(traced.graph, values | dict(zip(names, at, strict=True))).run(enable_io_processing=False)
        returned = next(n for n in traced.graph.nodes if n.op == "output").args[0]
        by_node = dict(zip(returned, found, strict=True))
        return tuple(by_node[o] for o in wanted)

    wanted = [o for o in traced.outputs if isinstance(o, fx.Node) and o.meta["val"].is_floating_point()]
    primals = tuple(values[n] for n in names)
    tangents = tuple(along[traced.parameters[n]] for n in names)
    try:
        results = dict(zip(wanted, torch.func.jvp(outputs, primals, tangents)[1], strict=True))
    except NotImplementedError as error:
        raise UnsupportedOpError(
            "cannot linearise this model: torch.export fixes its batch size, and where its values have their samples "
            f"is told by forward differentiation, which PyTorch does not have for all of its ops ({error})"
        ) from error
    return [results.get(o) if isinstance(o, fx.Node) else None for o in traced.outputs]
