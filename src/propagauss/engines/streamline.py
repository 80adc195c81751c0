"""Model + posterior -> one deterministic module that maps an input to the mean and covariance of the output."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from propagauss import rules  # noqa: F401 (registers the built-in rules)
from propagauss.alone import ALONE
from propagauss.checks import choice, flag, number
from propagauss.engines.arguments import as_source, bound, check_example, fitted_noise
from propagauss.errors import InputError
from propagauss.inputs import as_call
from propagauss.network.streamlined import Streamlined
from propagauss.passes.attention_values import keep_value_covariance
from propagauss.passes.check import check_first_order
from propagauss.passes.low_rank_variances import compress
from propagauss.passes.recognise import recognise
from propagauss.passes.rewriting.rewrite import rewrite
from propagauss.posteriors.base import Posterior
from propagauss.rules.registry import Options
from propagauss.tracing.trace import flatten, trace

_CHOICES = {
    "covariance": ("diagonal", "full"),
    "activation": ("linearise", "moments"),
    "attention": ("variance", "covariance"),
    "normalisation": ("scale", "jacobian"),
}


def streamline(
    model: nn.Module,
    posterior: Posterior | None,
    example: Any,
    *,
    covariance: Literal["diagonal", "full"] = "diagonal",
    activation: Literal["linearise", "moments"] = "linearise",
    attention: Literal["variance", "covariance"] = "variance",
    normalisation: Literal["scale", "jacobian"] = "scale",
    output: str | None = None,
    variance_tolerance: float = 0.0,
    check: bool = False,
) -> Streamlined:
    """Rewrite a trained model and a posterior over its parameters into a module that propagates Gaussians.

    The cost does not grow with the outputs. In exchange, covariances between layers are left out, and with
    `covariance="diagonal"` so are those between branches and positions that share a weight. `linearise` keeps them all,
    at a cost that grows with the outputs: choose it for few outputs, or where the ranking of inputs must be right.

    Args:
        model: any module that `torch.export` can trace, in evaluation mode; it is read, never changed.
        posterior: over any of its named parameters (the others are deterministic); None for none at all.
        example: an input the model accepts: a tensor, a tuple (positional) or a dict (keyword arguments). Give a
            `Gaussian` in place of a tensor for an input that will be uncertain. The batch size does not matter.
        covariance: keep variances only, or the joint covariance of all entries of a sample (quadratic in their number).
        activation: linearise elementwise functions at the mean, or match their first two moments.
        attention: keep variances of attention values only, or their covariance within a head.
        normalisation: in layer and RMS norms of the diagonal structure, keep the scale only (the paper), or use the
            whole Jacobian.
        variance_tolerance: how far the standard deviations of the output may be from what they would otherwise be, as a
            fraction averaged over the example: layers then get low-rank variances where that is enough
            (`compress`), at a fraction of the time and memory. Give real inputs as the example, a few dozen or more.
            0 is exact. For the diagonal structure; layers with a Kronecker or full posterior stay as they are.
        check: compare the standard deviations with those of a few Jacobian products of the model on the example, and
            warn where they are off by more than a factor of three. It costs a few dozen forward passes.
            `pg.tasks.fidelity` tells more, and `pg.linearise` is exact to first order.
        output: which field of a dataclass or dict output to return; `logits` if there is one, else the whole output.
    """
    options = Options(covariance, activation, attention, normalisation)
    for name, allowed in _CHOICES.items():
        choice(getattr(options, name), name, allowed)
    tolerance = _tolerance(variance_tolerance, options)
    check = flag(check, "check")
    model = as_source(model)
    check_example(example, output, sparse=True)
    with ALONE:
        net = _rewritten(model, bound(model, posterior), example, options, output, check)
    net.settings = {**vars(options), "output": output, "variance_tolerance": tolerance}
    net.noise = fitted_noise(posterior)
    return compress(net, net.leaves(example), tolerance) if tolerance else net


def _rewritten(
    model: nn.Module, posterior: Posterior | None, example: Any, options: Options, output: str | None, check: bool
) -> Streamlined:
    random = set() if posterior is None else set(posterior.names)
    traced = trace(model, example, output, open_sequence=not options.full, random=random)
    recognise(traced)
    if options.attention == "covariance" and not options.full:
        keep_value_covariance(traced)
    net = rewrite(traced, posterior, options)
    if check:
        check_first_order(net, traced, posterior, flatten(*as_call(example))[0])
    return net


def _tolerance(given: Any, options: Options) -> float:
    need = "a number of at least 0 (exact) and less than 1"
    tolerance = number(given, "variance_tolerance", need, lambda v: 0 <= v < 1)
    if tolerance and options.full:
        raise InputError("variance_tolerance is for covariance='diagonal': a full covariance has no low-rank variances")
    return tolerance
