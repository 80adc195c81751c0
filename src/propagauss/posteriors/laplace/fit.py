"""Laplace approximation of a trained model: a Gaussian over its parameters with precision `H / σ² + δ I`.

`H` is the generalised Gauss-Newton matrix of the training loss (curvature.py), `δ` the prior precision and, for a
likelihood with noise (regression), `σ` its standard deviation, both by default those of largest marginal likelihood
(evidence.py). What depends on the likelihood is asked of it (propagauss.likelihoods). The conventions are those of
laplace-torch with its default backend, so numbers can be compared.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from propagauss.alone import ALONE
from propagauss.checks import choice, flag, number
from propagauss.checks import patterns as names_of
from propagauss.errors import InputError, nearest
from propagauss.inputs import as_model, batches, check_eval, taken_by
from propagauss.likelihoods.base import Likelihood
from propagauss.likelihoods.registry import LIKELIHOODS, LikelihoodName, as_likelihood
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.fingerprint import fingerprint as weights_of
from propagauss.posteriors.laplace.columns import few
from propagauss.posteriors.laplace.curvature import Curvature, DiagonalCurvature, FullCurvature, KroneckerCurvature
from propagauss.posteriors.laplace.evidence import Evidence
from propagauss.posteriors.laplace.gradients import Batch, Forward
from propagauss.posteriors.laplace.independence import check_samples_apart
from propagauss.posteriors.laplace.layers import LayeredEvidence, Prior, layers_of, warn_of_bounds
from propagauss.posteriors.laplace.ranks import Ranks, check_parts, fingerprint
from propagauss.posteriors.laplace.reports import report_deterministic, report_unlearnt

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STRUCTURES: dict[str, type[Curvature]] = {
    "diagonal": DiagonalCurvature,
    "kronecker": KroneckerCurvature,
    "full": FullCurvature,
}
AUTOMATIC = "marginal_likelihood"


def fit_laplace(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: LikelihoodName | Likelihood = "classification",
    structure: Literal["diagonal", "kronecker", "full"] = "diagonal",
    parameters: str | Sequence[str] = "*",
    prior_precision: float | Literal["marginal_likelihood"] = AUTOMATIC,
    noise: float | Literal["marginal_likelihood"] = AUTOMATIC,
    progress: bool = True,
    distributed: bool | ProcessGroup = False,
    per_layer: bool = False,
) -> Posterior:
    """Posterior with precision `H / σ² + δ I` around the parameters of a trained model.

    Nothing of the model changes. Memory does not grow with outputs times parameters, except for `structure="full"`: it
    grows with the chosen parameters times themselves, or times data and outputs if those are less than half as many.

    Args:
        model: trained, in evaluation mode. It returns a tensor (or an object with `.logits`): `[B, C]` logits for
            classification (`[B, T, C]` for tokens, `[B, C, H, W]` for images: the labels' shape tells which), `[B]` or
            `[B, K]` values for regression, or logarithms of rates for counts.
        loader: yields `(x, y)` with all the training data, once; `x` is a tensor, a tuple for `model(*x)` or a dict for
            `model(**x)`; `y` holds class indices (`[B]`, `[B, T]`, `[B, H, W]`; those of -100 are skipped), or values
            in the shape of the output. Batches `(x1, x2, y)` and dictionaries with `labels`
            (Hugging Face) are taken as well.
        likelihood: "classification" (cross-entropy), "binary" (one logit for each yes or no), "regression" (Gaussian
            noise, the same for all outputs), "heteroscedastic" (the model gives `[..., 2]`: mean and log variance, or
            `(mean, log_variance)`, or fields of these names),
            "poisson" (counts; the model gives log rates) or "exponential" (waiting times; the same); or one of
            `propagauss.likelihoods` with options of its own, such as `BernoulliLikelihood(positive_weight=3.0)`.
        structure: "diagonal" and "full" are exact; "kronecker" is KFAC, with a pair of factors for each weight of a
            linear layer or convolution and a factor for each bias; all else stays deterministic, with a warning. With
            more than 1,024 outputs for each input, as a class for each pixel has them, the curvature is an unbiased
            estimate.
        parameters: glob pattern or patterns of the names to be random, as in `model.named_parameters()`. Those with
            `requires_grad=False` are left out; a warning names those that the data say nothing about.
        prior_precision: `δ`, or "marginal_likelihood" to choose it.
        noise: `σ`, or "marginal_likelihood" to choose it; regression only.
        progress: show a progress bar, if the output is a terminal.
        distributed: True (or a process group) if every rank of torch.distributed calls this with the same model and a
            loader over a part of the data of its own, which may be empty. All get the posterior of all the data.
        per_layer: choose a prior precision for each layer (a module with parameters of its own) by the marginal
            likelihood, rather than one for all.

    Returns:
        A posterior whose `details` hold `prior_precision` (with `per_layer`, `prior_precision.<layer>` of each layer),
        `noise` (regression) and `log_marginal_likelihood`.
    """
    with torch.inference_mode(False), Ranks.of(distributed) as ranks:
        with ranks.together(), ALONE:  # another thread may have exchanged the parameters
            named = as_likelihood(likelihood)
            delta, sigma = _check_options(named, structure, prior_precision, noise, per_layer)
            model = as_model(model)
            check_eval(model)
            check_parts(loader, ranks)
            forward = Forward(model, _select(model, parameters), named.joined)
            curvature = STRUCTURES[structure](forward)
            checksums = fingerprint(model) if ranks.group is not None else {}
        if ranks.group is not None:
            options = {"likelihood": named.name, "structure": structure, "prior_precision": delta, "noise": sigma}
            options["per_layer"] = per_layer
            ranks.require_same(options | {"parameters": forward.chosen}, "call fit_laplace alike on all ranks")
            ranks.require_same(checksums, "load the same checkpoint on all ranks, or broadcast it from one")
        with ranks.together():
            mine = _accumulate(curvature, loader, named, progress and ranks.rank == 0)
        curvature.merge(ranks)
        loss, targets, samples = (sum(parts) for parts in zip(*ranks.gather(mine), strict=True))
        with ranks.together():
            if samples == 0:
                raise InputError(
                    "the loader is empty: a Laplace fit needs the training data (an exhausted iterator, perhaps?)"
                )
            if targets == 0:
                raise InputError("every label of the loader is skipped: a Laplace fit needs labels of training data")
            report_deterministic(forward.chosen, curvature.names)
            squared_norm = sum(forward.parameters[n].double().square().sum().item() for n in curvature.names)
            evidence = Evidence(_eigenvalues(curvature), squared_norm, loss, targets if named.noisy else 0)
            common = evidence.maximise(delta, sigma)
            chosen = (
                _by_layer(curvature, evidence, *common, sigma is not None) if per_layer else _for_all(evidence, *common)
            )
        chosen = ranks.gather(chosen)[0]
        posterior = curvature.posterior(chosen.prior, chosen.noise).bind(forward.parameters)
    report_unlearnt([n for n in curvature.unlearnt if posterior.variance(n).any()])
    posterior.fitted_on = weights_of(forward.parameters)
    posterior.details = chosen.precisions | ({"noise": chosen.noise} if named.noisy else {})
    posterior.details["log_marginal_likelihood"] = chosen.log_marginal_likelihood
    return posterior


class _Chosen(NamedTuple):
    """The hyperparameters of a posterior."""

    prior: Prior
    precisions: dict[str, float]  # as they are reported
    noise: float
    log_marginal_likelihood: float


def _for_all(evidence: Evidence, delta: float, sigma: float) -> _Chosen:
    return _Chosen(delta, {"prior_precision": delta}, sigma, evidence.log_marginal_likelihood(delta, sigma))


def _by_layer(curvature: Curvature, evidence: Evidence, delta: float, sigma: float, fixed: bool) -> _Chosen:
    """A prior precision for each layer, in a search that starts at the best common one."""
    layers, parameters = layers_of(curvature.names), curvature.forward.parameters
    squares = [sum(parameters[n].double().square().sum().item() for n in names) for names in layers.values()]
    norms = torch.tensor(squares, dtype=torch.float64)
    layered = LayeredEvidence(curvature.log_det(layers), norms, evidence.loss, evidence.targets)
    found, sigma = layered.maximise(delta, sigma, fixed or not evidence.targets)
    by_layer = dict(zip(layers, found.tolist(), strict=True))
    warn_of_bounds(by_layer)
    prior = {name: by_layer[layer] for layer, names in layers.items() for name in names}
    reported = {f"prior_precision.{layer}": value for layer, value in by_layer.items()}
    return _Chosen(prior, reported, sigma, layered.log_marginal_likelihood(found, sigma))


def _check_options(
    likelihood: Likelihood, structure: str, prior_precision: float | str, noise: float | str, per_layer: bool
) -> tuple[float | None, float | None]:
    """`δ` and `σ`, None for what is to be chosen."""
    if flag(per_layer, "per_layer") and prior_precision != AUTOMATIC:
        raise InputError(f"per_layer=True chooses prior precisions, so prior_precision= must be '{AUTOMATIC}'")
    choice(structure, "structure", STRUCTURES)
    noisy = [name for name, each in LIKELIHOODS.items() if each.noisy]
    automatic = isinstance(noise, str) and noise == AUTOMATIC
    if not likelihood.noisy and not automatic:
        raise InputError(f"noise= is for likelihood={' or '.join(map(repr, noisy))}; {likelihood.name} has none")
    sigma = _positive(noise, "noise") if likelihood.noisy else 1.0
    return _positive(prior_precision, "prior_precision"), sigma


def _positive(value: float | str, name: str) -> float | None:
    """A given hyperparameter, or None if it is to be chosen."""
    if isinstance(value, str) and value == AUTOMATIC:
        return None
    return number(value, name, f"a positive number or '{AUTOMATIC}'", lambda v: v > 0)


# -- the model


def _select(model: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    known = dict(model.named_parameters())
    patterns = names_of([patterns], "parameters=", next(iter(known), "*"))
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
            f"every parameter that matches {', '.join(patterns)} is frozen (requires_grad=False), "
            "so none would be random: call requires_grad_() on those that should be"
        )
    odd = [n for n in chosen if not known[n].is_floating_point()]
    if odd:
        raise InputError(
            f"'{odd[0]}' is {known[odd[0]].dtype}; only real floating-point parameters can be random: choose others "
            "with parameters="
        )
    if len({known[n].dtype for n in chosen}) > 1:
        raise InputError(f"the chosen parameters have mixed dtypes: { {str(known[n].dtype) for n in chosen} }")
    return tuple(chosen)


# -- the data


def _eigenvalues(curvature: Curvature) -> np.ndarray:
    try:
        found = curvature.eigenvalues()
    except RuntimeError:  # of the decomposition
        found = np.full(1, np.nan)
    if not np.isfinite(found).all():
        raise InputError(
            "the curvature is not finite, since squares of inputs or derivatives overflow: rescale or normalise the "
            "inputs, or use double precision"
        )
    return found


def _accumulate(
    curvature: Curvature, loader: Iterable[Any], likelihood: Likelihood, progress: bool
) -> tuple[float, int, int]:
    """Run over the data once; returns the sums of `Terms.loss` and `Terms.targets`, and the number of samples."""
    forward, loss, targets, samples = curvature.forward, 0.0, 0, 0
    device = forward.parameters[forward.chosen[0]].device
    with torch.enable_grad():
        pairs = batches(loader, taken_by(forward.model), progress="Laplace" if progress else None, empty=True)
        for i, (x, y) in enumerate(pairs):
            if y.shape[0] == 0:
                continue
            where = f"batch {i}"
            x, y = _plain(x, device), _plain(y, device)
            output, seen = forward.capture(x, f"{where}: ", len(y))
            if not output.isfinite().all():
                raise InputError(f"{where}: the outputs of the model are not finite{_cause(x, forward)}")
            if samples == 0:
                chosen = {name: forward.parameters[name] for name in forward.chosen}
                check_samples_apart(forward, chosen, x, output.shape, len(y))
            terms = likelihood.terms(output, y, where)
            if not math.isfinite(terms.loss):
                raise InputError(f"{where}: the loss is {terms.loss}; are there missing values among the targets?")
            loss, targets, samples = loss + terms.loss, targets + terms.targets, samples + len(y)
            column, count = few(terms.column, terms.output.shape[1], seed=i)
            with _explained(where):
                curvature.add(Batch(forward, x, len(y), terms.output, seen, column, count))
    return loss, targets, samples


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """What PyTorch says of models that cannot be trained either."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise InputError(
            f"{where}: the model writes in place to values whose gradients need them, as with h[:, 0] = h[:, 1] ** 2, "
            f"so that it has none: write to a copy ({error})"
        ) from error


def _plain(value: Any, device: torch.device) -> Any:
    """On the model's device, and tensors that autograd can use even if they were made in inference mode."""
    value = tuple(value) if isinstance(value, list) else value

    def plain(t: Tensor) -> Tensor:
        t = t.to(device)
        return t.clone() if t.is_inference() else t

    return pytree.tree_map_only(Tensor, plain, value)


def _cause(x: Any, forward: Forward) -> str:
    """Where values that are not finite come from, and what to do."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and not leaf.isfinite().all():
            return ", and neither are its inputs: remove or impute those points"
    bad = [name for name, p in forward.parameters.items() if not p.isfinite().all()]
    return f", as weights of '{bad[0]}' are not: load a sound checkpoint" if bad else ": rescale its inputs"
