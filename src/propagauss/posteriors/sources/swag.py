"""SWAG (Maddox et al., 2019): a posterior from the weights that SGD passes through at the end of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from propagauss.checks import kind, named, tensor, whole
from propagauss.errors import PosteriorError
from propagauss.inputs import as_model
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.diagonal import DiagonalPosterior
from propagauss.posteriors.fingerprint import fingerprint
from propagauss.posteriors.low_rank import LowRankPosterior


def from_swag(snapshots: Iterable[Mapping[str, Tensor]], model: nn.Module, rank: int = 20) -> Posterior:
    """`Σ = (diag(v) + D Dᵀ / (K - 1)) / 2` from weights collected along the way.

    `v` is the variance of each weight over all snapshots, and the columns of `D` are the deviations of the last `K` of
    them from the mean. With `rank=0`, SWAG-diagonal: `Σ = diag(v)`.

    Args:
        snapshots: parameters by name, such as state dicts (other entries are ignored), in the order of training; only
            one at a time has to be in memory besides the last `rank`.
        model: holds the mean of the snapshots, as `torch.optim.swa_utils.AveragedModel(...).module` does. Batch
            normalisation needs `update_bn` after averaging. Parameters that never changed are left out.
        rank: `K`, the most deviations to keep.

    Returns:
        A posterior whose `details` hold `snapshots`, their number.
    """
    rank = whole(rank, "rank", error=PosteriorError)
    if rank == 1:
        raise PosteriorError("rank is 1; it must be 0 (variances only) or at least 2")
    if isinstance(snapshots, (str, Mapping, Tensor, nn.Module)) or not isinstance(snapshots, Iterable):
        raise PosteriorError(f"snapshots are {kind(snapshots)}; a list of state dicts is needed")
    model = as_model(model)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    count, last = 0, []
    mean = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in parameters.items()}
    squares = {n: torch.zeros_like(m) for n, m in mean.items()}
    for snapshot in snapshots:
        found, count = _read(snapshot, parameters, count), count + 1
        for n, t in found.items():  # Welford: no difference of large numbers
            before = t - mean[n]
            mean[n] += before / count
            squares[n] += before * (t - mean[n])
        last = [*last, found][-rank:] if rank else []
    if count < 2:
        raise PosteriorError(f"SWAG needs at least two snapshots of the weights, got {count}")
    moved = [n for n in parameters if squares[n].any()]
    if not moved:
        raise PosteriorError("the snapshots are all the same: clone the weights when you collect them")
    _check_mean(parameters, mean, squares, count)
    variances = {n: squares[n] / count for n in moved}
    posterior: Posterior
    if rank == 0:
        posterior = DiagonalPosterior({n: v.to(parameters[n].dtype) for n, v in variances.items()})
    else:
        size = (2 * (len(last) - 1)) ** 0.5
        posterior = LowRankPosterior(
            {n: (v / 2).to(parameters[n].dtype) for n, v in variances.items()},
            {n: (torch.stack([s[n] - mean[n] for s in last]) / size).to(parameters[n].dtype) for n in moved},
        )
    posterior.fitted_on = fingerprint(parameters)
    posterior.details = {"snapshots": float(count)}
    return posterior


def _read(snapshot: Mapping[str, Tensor], parameters: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    named(snapshot, f"the entries of snapshot {index}", "model.state_dict()", PosteriorError)
    for n in parameters:
        if n in snapshot:
            tensor(snapshot[n], f"'{n}' of snapshot {index}", PosteriorError)
    missing = [n for n, p in parameters.items() if n not in snapshot or snapshot[n].shape != p.shape]
    if missing:
        raise PosteriorError(
            f"snapshot {index} has no '{missing[0]}' of shape {tuple(parameters[missing[0]].shape)}: collect "
            "{n: p.detach().clone() for n, p in model.named_parameters()}"
        )
    found = {n: snapshot[n].detach().to(p.device, torch.float64) for n, p in parameters.items()}
    bad = [n for n, t in found.items() if not t.isfinite().all()]
    if bad:
        raise PosteriorError(f"'{bad[0]}' has values that are not finite in snapshot {index}")
    return found


def _check_mean(
    parameters: Mapping[str, Tensor], mean: Mapping[str, Tensor], squares: Mapping[str, Tensor], count: int
) -> None:
    """Raise unless the model holds the mean, up to a small part of the standard deviation and rounding."""
    for n, p in parameters.items():
        away = (p.double() - mean[n]).abs()
        allowed = 0.01 * (squares[n] / count).sqrt() + 1e3 * torch.finfo(p.dtype).eps * mean[n].abs()
        if (away > allowed).any():
            raise PosteriorError(
                f"'{n}' of the model is not the mean of the snapshots, which SWAG predicts with: collect a snapshot "
                "whenever AveragedModel.update_parameters is called, and pass its .module, or load the mean yourself"
            )
