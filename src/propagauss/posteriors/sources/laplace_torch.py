"""Posteriors fitted with laplace-torch, read without importing it.

Every number is taken from what the object itself reports (`posterior_variance`, `posterior_precision`,
`posterior_covariance`), so prior precision, noise, temperature and damping are those it uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from propagauss.errors import PosteriorError
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.fingerprint import fingerprint
from propagauss.posteriors.full import FullPosterior
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior
from propagauss.posteriors.memory import require_memory


def from_laplace(la: Any) -> Posterior:
    """The posterior of a fitted laplace-torch object.

    Args:
        la: what `laplace.Laplace(...)` returns, after `la.fit(...)`: `hessian_structure` diag, kron or full;
            `subset_of_weights` all, last_layer or subnetwork. A subnetwork of single entries gives a posterior over the
            parameters it touches, with zero variance elsewhere in them.

    Returns:
        A posterior with the names of the original model; `details` hold `prior_precision` if it is one number, and
        `noise` for regression.
    """
    read = _reader(la)
    if not getattr(la, "n_data", 0):
        raise PosteriorError(f"this {type(la).__name__} is not fitted: call la.fit(train_loader) first")
    model, parameters = _parameters(la)
    posterior = read(la, parameters).bind(dict(model.named_parameters()))
    posterior.fitted_on = fingerprint(dict(model.named_parameters()))
    posterior.details = _details(la)
    return posterior


def _reader(la: Any) -> Callable[[Any, dict[str, Tensor]], Posterior]:
    kind = type(la)
    if hasattr(kind, "posterior_variance"):
        return _diagonal
    if hasattr(kind, "posterior_covariance"):
        return _full
    if hasattr(la, "H_facs"):
        return _kronecker
    if hasattr(kind, "functional_variance"):
        raise PosteriorError(
            f"a {kind.__name__} holds no diagonal, Kronecker or full covariance of the weights: "
            "fit laplace.Laplace(..., hessian_structure='diag', 'kron' or 'full'), or use propagauss.fit_laplace"
        )
    raise PosteriorError(f"from_laplace takes an object of laplace-torch, got a {kind.__name__}")


def _parameters(la: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The user's model, and its random parameters in the order in which laplace-torch flattens them."""
    last = getattr(la.model, "last_layer", None) if hasattr(la.model, "forward_with_features") else None
    model: nn.Module = la.model if last is None else la.model.model  # last-layer Laplace wraps a copy of the model
    names = {id(p): name for name, p in model.named_parameters()}
    random = list(la.params if last is None else last.parameters())
    if any(id(p) not in names for p in random):
        raise PosteriorError("la.model no longer holds the parameters that la was made with: make and fit la again")
    return model, {names[id(p)]: p for p in random}


def _details(la: Any) -> dict[str, float]:
    precision = torch.as_tensor(la.prior_precision)
    details = {"prior_precision": precision.item()} if precision.numel() == 1 else {}
    return details | ({"noise": float(la.sigma_noise)} if la.likelihood == "regression" else {})


def _diagonal(la: Any, parameters: dict[str, Tensor]) -> Posterior:
    variance = _reported(la, "posterior_variance")
    touched, where = _subnetwork(la, parameters)
    if where is not None:
        variance = variance.new_zeros(_total(touched)).index_copy(0, where, variance)
    parts = variance.split([p.numel() for p in touched.values()])
    return DiagonalPosterior({n: v.reshape(p.shape) for (n, p), v in zip(touched.items(), parts, strict=True)})


def _full(la: Any, parameters: dict[str, Tensor]) -> Posterior:
    covariance = _reported(la, "posterior_covariance")
    touched, where = _subnetwork(la, parameters)
    if where is not None:
        size = _total(touched)
        what = f"the covariance of {size} parameters (all entries of those that the subnetwork touches)"
        require_memory(2 * size**2 * covariance.element_size(), what, covariance.device)
        rows = covariance.new_zeros(len(where), size).index_copy(1, where, covariance)
        covariance = covariance.new_zeros(size, size).index_copy(0, where, rows)
    return FullPosterior(list(touched), (covariance + covariance.mT) / 2)


def _kronecker(la: Any, parameters: dict[str, Tensor]) -> Posterior:
    precision = _reported(la, "posterior_precision")
    blocks = list(zip(precision.eigenvectors, precision.eigenvalues, precision.deltas, strict=True))
    if len(blocks) != len(parameters):
        raise PosteriorError(
            f"la has {len(blocks)} Kronecker blocks for {len(parameters)} parameters ({', '.join(parameters)}): "
            "some have no Kronecker factors; freeze those before making la, or use propagauss.fit_laplace"
        )
    factors = {}
    for name, (vectors, values, delta) in zip(parameters, blocks, strict=True):
        left, right = vectors[0].detach(), vectors[1].detach() if len(vectors) == 2 else None
        variance = 1 / _block_precision(values, delta, precision.damping)
        if variance.numel() != parameters[name].numel():
            raise PosteriorError(
                f"the Kronecker block of '{name}' has {variance.numel()} entries, it {parameters[name].numel()}: "
                "laplace-torch mixes up the blocks of a layer with frozen parameters; use propagauss.fit_laplace"
            )
        factors[name] = Eigenfactors(left, right, variance.detach())
    return KroneckerPosterior.from_eigen(factors)


def _block_precision(values: Any, delta: Tensor, damped: bool) -> Tensor:
    """`λ_B λ_A + δ`, or `(λ_B + √δ)(λ_A + √δ)` if damped."""
    if len(values) == 1:
        return values[0] + delta
    if damped:
        return torch.outer(values[0] + delta.sqrt(), values[1] + delta.sqrt())
    return torch.outer(*values) + delta


def _subnetwork(la: Any, parameters: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """The parameters that have random entries, and where those entries are once these parameters are flattened in turn.

    The second is None if all entries are random.
    """
    indices = la.backend.subnetwork_indices if hasattr(la, "n_params_subnet") else None
    if indices is None:
        return parameters, None
    touched, positions = {}, torch.full((_total(parameters),), -1, dtype=torch.long, device=indices.device)
    start = size = 0
    for name, p in parameters.items():
        if ((indices >= start) & (indices < start + p.numel())).any():
            touched[name] = p
            positions[start : start + p.numel()] = torch.arange(size, size + p.numel())
            size += p.numel()
        start += p.numel()
    return touched, positions[indices]


def _total(parameters: dict[str, Tensor]) -> int:
    return sum(p.numel() for p in parameters.values())


def _reported(la: Any, attribute: str) -> Any:
    try:
        value = getattr(la, attribute)
    except (AttributeError, ValueError, RuntimeError) as error:
        raise PosteriorError(f"this {type(la).__name__} cannot report its {attribute}: {error}") from error
    return value.detach()
