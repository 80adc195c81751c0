"""Laplace approximation of a trained model: a Gaussian over its parameters with precision `H / σ² + δ I`.

`H` is the generalised Gauss-Newton matrix of the training loss (curvature.py), `δ` the prior precision and, for
regression, `σ` the standard deviation of the noise, both by default those of largest marginal likelihood (evidence.py).
The conventions are those of laplace-torch with its default backend, so numbers can be compared.
"""

from __future__ import annotations

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from tqdm import tqdm

from propagauss.errors import InputError, nearest
from propagauss.inputs import check_eval
from propagauss.posterior.base import Posterior
from propagauss.posterior.curvature import Curvature, DiagonalCurvature, FullCurvature, KroneckerCurvature
from propagauss.posterior.evidence import Evidence
from propagauss.posterior.gradients import Batch, Forward

STRUCTURES: dict[str, type[Curvature]] = {
    "diagonal": DiagonalCurvature,
    "kronecker": KroneckerCurvature,
    "full": FullCurvature,
}
AUTOMATIC = "marginal_likelihood"


def fit_laplace(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Literal["classification", "regression"] = "classification",
    structure: Literal["diagonal", "kronecker", "full"] = "diagonal",
    parameters: str | Sequence[str] = "*",
    prior_precision: float | Literal["marginal_likelihood"] = AUTOMATIC,
    noise: float | Literal["marginal_likelihood"] = AUTOMATIC,
    progress: bool = True,
) -> Posterior:
    """Posterior with precision `H / σ² + δ I` around the parameters of a trained model.

    Nothing of the model changes. Memory does not grow with outputs times parameters; `structure="full"` stores a square
    matrix over all chosen parameters.

    Args:
        model: trained, in evaluation mode. It returns a tensor (or an object with `.logits`): `[B, C]` logits for
            classification, `[B]` or `[B, K]` values for regression.
        loader: yields `(x, y)` with all the training data, once; `x` is a tensor, a tuple for `model(*x)` or a dict for
            `model(**x)`; `y` holds class indices `[B]`, or values in the shape of the output.
        likelihood: "classification" (cross-entropy) or "regression" (Gaussian noise, the same for all outputs).
        structure: "diagonal" and "full" are exact; "kronecker" is KFAC, with a pair of factors for each weight of a
            linear layer or convolution and a factor for each bias; all else stays deterministic, with a warning.
        parameters: glob pattern or patterns of the names to be random, as in `model.named_parameters()`. Those with
            `requires_grad=False` are left out.
        prior_precision: `δ`, or "marginal_likelihood" to choose it.
        noise: `σ`, or "marginal_likelihood" to choose it; regression only.
        progress: show a progress bar, if the output is a terminal.

    Returns:
        A posterior whose `details` hold `prior_precision`, `noise` (regression) and `log_marginal_likelihood`.
    """
    if structure not in STRUCTURES:
        raise InputError(f"structure is one of {', '.join(STRUCTURES)}; got {structure!r}")
    if likelihood not in _LIKELIHOODS:
        raise InputError(f"likelihood is 'classification' or 'regression'; got {likelihood!r}")
    if likelihood == "classification" and noise != AUTOMATIC:
        raise InputError("noise= is for likelihood='regression'; classification has none")
    delta = _positive(prior_precision, "prior_precision")
    sigma = 1.0 if likelihood == "classification" else _positive(noise, "noise")
    check_eval(model)
    with torch.inference_mode(False):
        forward = Forward(model, _select(model, parameters))
        curvature = STRUCTURES[structure](forward)
        loss, targets = _accumulate(curvature, loader, _LIKELIHOODS[likelihood], progress)
        _report_deterministic(forward.chosen, curvature.names)
        squared_norm = sum(forward.parameters[n].double().square().sum().item() for n in curvature.names)
        evidence = Evidence(curvature.eigenvalues(), squared_norm, loss, targets)
        delta, sigma = evidence.maximise(delta, sigma)
        posterior = curvature.posterior(delta, sigma).bind(dict(model.named_parameters()))
    posterior.details = {"prior_precision": delta} | ({"noise": sigma} if likelihood == "regression" else {})
    posterior.details["log_marginal_likelihood"] = evidence.log_marginal_likelihood(delta, sigma)
    return posterior


def _positive(value: float | str, name: str) -> float | None:
    """A given hyperparameter, or None if it is to be chosen."""
    if value == AUTOMATIC:
        return None
    if isinstance(value, str) or not (math.isfinite(value) and value > 0):
        raise InputError(f"{name} is a positive number or '{AUTOMATIC}'; got {value!r}")
    return float(value)


# -- the model


def _select(model: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    known = dict(model.named_parameters())
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(
                f"no parameter of the model matches '{pattern}'{nearest(pattern, known)} "
                f"(named_parameters() has {', '.join(list(known)[:6])}{', ...' if len(known) > 6 else ''})"
            )
    matching = [n for n in known if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    chosen = [n for n in matching if known[n].requires_grad]
    if not chosen:
        raise InputError(
            f"every parameter that matches {', '.join(patterns) or 'an empty list'} is frozen (requires_grad=False), "
            "so none would be random: call requires_grad_() on those that should be"
        )
    if len({known[n].dtype for n in chosen}) > 1:
        raise InputError(f"the chosen parameters have mixed dtypes: { {str(known[n].dtype) for n in chosen} }")
    return tuple(chosen)


def _report_deterministic(chosen: tuple[str, ...], fitted: tuple[str, ...]) -> None:
    left = [n for n in chosen if n not in fitted]
    if not left:
        return
    reason = "Kronecker factors exist only for weights and biases of linear layers and convolutions; not for "
    if not fitted:
        raise InputError(f"{reason}{', '.join(left)}: use structure='diagonal' or 'full'")
    warnings.warn(
        f"{reason}{', '.join(left)}, which stay deterministic (structure='diagonal' and 'full' have no such limit)",
        stacklevel=3,
    )


# -- the data


def _accumulate(
    curvature: Curvature, loader: Iterable[Any], likelihood: _Likelihood, progress: bool
) -> tuple[float, int]:
    """Run over the data once; returns the sums of `_Terms.loss` and `_Terms.targets`."""
    forward, loss, targets, samples = curvature.forward, 0.0, 0, 0
    device = forward.parameters[forward.chosen[0]].device
    cuda = [device] if device.type == "cuda" else []
    # iterating over a DataLoader draws random numbers even if it does not shuffle
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        for number, item in enumerate(tqdm(loader, desc="Laplace", disable=None if progress else True)):
            x, y = _pair(item, device)
            if y.shape[0] == 0:
                continue
            output, seen = forward.capture(x)
            where = f"batch {number}"
            if not output.isfinite().all():
                raise InputError(f"{where}: the outputs of the model are not finite")
            terms = likelihood(output, y, where)
            if not math.isfinite(terms.loss):
                raise InputError(f"{where}: the loss is {terms.loss}; are there missing values among the targets?")
            loss, targets, samples = loss + terms.loss, targets + terms.targets, samples + len(y)
            curvature.add(Batch(forward, x, len(y), terms.output, seen, terms.column))
    if samples == 0:
        raise InputError("the loader is empty: a Laplace fit needs the training data (an exhausted iterator, perhaps?)")
    return loss, targets


def _pair(item: Any, device: torch.device) -> tuple[Any, Tensor]:
    if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Tensor) and item[1].dim() > 0):
        raise InputError(
            f"the loader must yield (x, y) with a tensor y, got a {type(item).__name__}; "
            "for a dictionary of inputs yield (inputs, labels)"
        )
    x, y = item
    x = tuple(x) if isinstance(x, list) else dict(x) if isinstance(x, Mapping) else x
    return pytree.tree_map(lambda t: _plain(t, device) if isinstance(t, Tensor) else t, x), _plain(y, device)


def _plain(t: Tensor, device: torch.device) -> Tensor:
    """On the model's device, and a tensor that autograd can use even if it was made in inference mode."""
    t = t.to(device)
    return t.clone() if t.is_inference() else t


class _Terms(NamedTuple):
    """What the likelihood says about one batch, at unit noise."""

    output: Tensor  # [B, C], with its graph
    loss: float  # negative log-likelihood without its constant
    targets: int  # number of target values, 0 for classification
    column: Callable[[int], Tensor]  # c -> [B, C], column c of a root of the Hessian of the loss in the outputs


def _classification(output: Tensor, y: Tensor, where: str) -> _Terms:
    """Cross-entropy; its Hessian `diag(p) - p pᵀ` has a root with columns `√p_c (e_c - p)`."""
    if output.dim() != 2 or output.shape[1] < 2:
        raise InputError(
            f"{where}: classification needs outputs [B, C] with at least 2 classes, got {tuple(output.shape)}"
            + ("; give a binary model two logits" if output.shape[-1] == 1 else "")
        )
    if y.is_floating_point() or y.dtype == torch.bool:
        raise InputError(f"{where}: labels must be integers, the index of the class; got {y.dtype}")
    if y.shape != output.shape[:1]:
        raise InputError(
            f"{where}: labels have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; labels must be [B]"
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= output.shape[1]:
        raise InputError(
            f"{where}: labels go from {low} to {high}, but the model has classes 0 to {output.shape[1] - 1}"
        )
    loss = F.cross_entropy(output.detach().double(), y.long(), reduction="sum").item()
    p = output.detach().softmax(1)
    return _Terms(output, loss, 0, lambda c: p[:, c : c + 1].sqrt() * (_unit(p, c) - p))


def _regression(output: Tensor, y: Tensor, where: str) -> _Terms:
    """Half the sum of squares; its Hessian is the identity."""
    fits = y.shape == output.shape or y.shape == (*output.shape, 1) or (*y.shape, 1) == output.shape
    if not fits or output.dim() == 0:
        raise InputError(
            f"{where}: targets have shape {tuple(y.shape)}, outputs {tuple(output.shape)}; they must agree"
        )
    output = output.reshape(len(y), -1)
    loss = 0.5 * (output.detach().double() - y.reshape(output.shape)).square().sum().item()
    return _Terms(output, loss, y.numel(), lambda c: _unit(output, c))


def _unit(like: Tensor, c: int) -> Tensor:
    unit = torch.zeros_like(like)
    unit[:, c] = 1
    return unit


_Likelihood = Callable[[Tensor, Tensor, str], _Terms]
_LIKELIHOODS: dict[str, _Likelihood] = {"classification": _classification, "regression": _regression}
