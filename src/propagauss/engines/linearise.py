"""Model + posterior -> one deterministic module: the mean and the first-order covariance `J Σ Jᵀ` of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from propagauss import rules  # noqa: F401 (registers the built-in rules)
from propagauss.alone import ALONE, levels_kept
from propagauss.checks import choice as one_of
from propagauss.engines.arguments import as_source, bound, check_example, fitted_noise
from propagauss.errors import UnsupportedOpError
from propagauss.inputs import explained
from propagauss.network.linearised import Linearised
from propagauss.passes.backwards.choice import checked, choose
from propagauss.passes.backwards.direction import check_one_direction
from propagauss.passes.backwards.narrow import read_before_last_layer
from propagauss.passes.backwards.suitable import check_draws
from propagauss.passes.backwards.sweep import Sweep
from propagauss.passes.early_selection import select_early
from propagauss.passes.recognise import recognise
from propagauss.passes.samples_apart import check_samples_apart
from propagauss.posteriors.base import Posterior
from propagauss.rules import adjoints  # noqa: F401 (registers them)
from propagauss.tracing.trace import Traced, trace


def linearise(
    model: nn.Module,
    posterior: Posterior | None,
    example: Any,
    *,
    outputs: int | Sequence[int] | None = None,
    covariance: Literal["full", "diagonal"] = "full",
    output: str | None = None,
) -> Linearised:
    """Rewrite a trained model and a posterior into a module that returns `N(f(x), J Σ Jᵀ)`, `J = ∂f/∂w`.

    To first order in the parameters nothing is left out: residual branches, positions that share a weight,
    normalisation, queries and keys, and covariances between layers where the posterior has them. The outputs'
    sensitivities go backwards through the model once, so the cost grows with the number of outputs.

    Args:
        model: any module that `torch.export` can trace, in evaluation mode; it is read, never changed. Samples of a
            batch must not depend on each other.
        posterior: over any of its named parameters (the others are deterministic); None for none at all.
        example: an input the model accepts: a tensor, a tuple (positional) or a dict (keyword arguments). Give a
            `Gaussian` in place of a tensor for an input that will be uncertain. The batch size does not matter.
        outputs: a number `k`: only the `k` largest entries of the last dimension get a covariance, for each sample and
            at each position (`[batch, tokens, vocabulary]`: for each token). A list: the entries with these indices.
            The mean is that of all outputs; the others report variance 0. `latent.chosen` is (index, mean, covariance).
            The cost grows with the chosen outputs alone. None is all of them.
        covariance: of all outputs of a sample, or their variances only.
        output: which field of a dataclass or dict output to return; `logits` if there is one, else the whole output.
    """
    one_of(covariance, "covariance", ("full", "diagonal"))
    wanted = checked(outputs)
    model = as_source(model)
    check_example(example, output, sparse=False)
    with ALONE, levels_kept():
        net = _linearised(model, bound(model, posterior), example, wanted, covariance == "full", output)
    net.settings = {"outputs": outputs, "covariance": covariance, "output": output}
    net.noise = fitted_noise(posterior)
    return net


def _linearised(
    model: nn.Module,
    posterior: Posterior | None,
    example: Any,
    wanted: int | tuple[int, ...] | None,
    full: bool,
    output: str | None,
) -> Linearised:
    random = set() if posterior is None else set(posterior.names)
    traced = trace(model, example, output, random=random)
    recognise(traced)
    select_early(traced)
    read_before_last_layer(traced)
    check_draws(traced)
    with explained(model, example):
        check_samples_apart(traced)
    _check_outputs(traced)
    choice = choose(wanted, traced)
    if posterior is not None and not traced.batch_is_dynamic:
        check_one_direction(traced, posterior, choice)
    return Sweep(traced, posterior, full, choice).run()


def _check_outputs(traced: Traced) -> None:
    for node in traced.outputs:
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and value.is_complex():
            raise UnsupportedOpError("the model returns complex numbers: return torch.view_as_real of them")
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise UnsupportedOpError("the model returns a sparse tensor: return .to_dense() of it")
