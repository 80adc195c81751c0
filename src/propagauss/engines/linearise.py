"""Model + posterior -> one deterministic module: the mean and the first-order covariance `J Σ Jᵀ` of the output."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from propagauss import rules  # noqa: F401 (registers the built-in rules)
from propagauss.network.linearised import Linearised
from propagauss.passes.backwards.sweep import Sweep
from propagauss.posteriors.base import Posterior
from propagauss.rules import adjoints  # noqa: F401
from propagauss.tracing.trace import trace


def linearise(
    model: nn.Module,
    posterior: Posterior | None,
    example: Any,
    *,
    outputs: Any = None,
    covariance: Literal["full", "diagonal"] = "full",
    output: str | None = None,
) -> Linearised:
    if posterior is not None:
        posterior = posterior.bind({name: p.detach() for name, p in model.named_parameters()})
    random = set() if posterior is None else set(posterior.names)
    traced = trace(model, example, output, random=random)
    return Sweep(traced, posterior, covariance == "full").run()
