"""The two posteriors of the UCI experiment: full Laplace around a trained network, and a mean field trained by IVON.

The noise is chosen on the training part in both: by the marginal likelihood, and by its lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from propagauss.experiments.data import Split
from propagauss.experiments.paper.datasets import DataMissing
from propagauss.experiments.training import BATCH, mlp, train
from propagauss.posterior import FullPosterior, Posterior, from_ivon
from propagauss.posterior.evidence import Evidence

BLOCK = 1024  # rows of a covariance made at a time
IVON: dict[str, Any] = {"lr": 0.05, "beta2": 0.999, "hess_init": 10.0}
PRIOR_PRECISION, NOISE_RATE = 1.0, 1e-2
PROTOCOL = (
    "Noise: one standard deviation for all methods of a posterior (the paper does not say how it is chosen). LA: prior "
    "precision and noise of largest marginal likelihood, during training (of the Kronecker posterior, four rounds) and "
    "for the full posterior. MFVI: the noise of largest lower bound, found by gradient steps along with the weights; "
    f"prior precision {PRIOR_PRECISION:g} (when the lower bound chose it too, networks of servo and ccs were switched "
    f"off); step size {IVON['lr']:g}, beta2 {IVON['beta2']:g} and initial Hessian {IVON['hess_init']:g} for all sets, "
    "looked for on the validation part of the first fold of servo, ccs and pt (which has test points of other folds in "
    "it). MAP: the network of LA, its noise fitted on the validation part."
)


@dataclass(frozen=True)
class Fitted:
    """A network, a posterior around its weights and the noise that belongs to both."""

    model: nn.Module
    posterior: Posterior
    noise: float
    prior_precision: float


def laplace(split: Split, sizes: Sequence[int], steps: int, seed: int) -> Fitted:
    """Trained in four rounds of about `steps` steps (see `training.train`), then `full_laplace`."""
    model = train(split, sizes, "regression", _epochs(split, steps), seed)
    return full_laplace(model, *split.train)


def _epochs(split: Split, steps: int) -> int:
    return math.ceil(steps / math.ceil(len(split.train[0]) / BATCH))


@torch.no_grad()
def full_laplace(model: nn.Module, x: Tensor, y: Tensor) -> Fitted:
    """What `pg.fit_laplace(structure="full")` gives, for one output, also where parameters outnumber the data by far.

    With the Jacobian `J = U √h Vᵀ [n, P]` the covariance is `(I - V diag(h / (h + δσ²)) Vᵀ) / δ`: eigenvectors of the
    smaller of `J Jᵀ` and `Jᵀ J` are enough. The root that `sample` needs is of the same form, so no `[P, P]` matrix is
    ever decomposed. (12,901 parameters: 2.5 GB at most and seconds, where the eigenvectors of a dense `H` would take
    more than 5 GB and ten minutes.)
    """
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = _jacobian(model, parameters, x).double()
    values, vectors = _right_singular(jacobian)
    squared_norm = sum(p.double().square().sum().item() for p in parameters.values())
    loss = 0.5 * (model(x) - y).double().square().sum().item()
    delta, sigma = Evidence(values.numpy(), squared_norm, loss, y.numel()).maximise(None, None)
    shrink = values / (values + delta * sigma**2)
    covariance = _identity_minus(vectors, shrink).div_(delta)
    root = _identity_minus(vectors, 1 - (1 - shrink).sqrt()).div_(math.sqrt(delta))
    posterior = RootedPosterior({n: p.shape for n, p in parameters.items()}, covariance, root)
    posterior.details = {"prior_precision": delta, "noise": sigma}
    return Fitted(model, posterior, sigma, delta)


class RootedPosterior(FullPosterior):
    """A full posterior whose root is known; positive by construction, so that no decomposition has to prove it."""

    def __init__(self, shapes: Mapping[str, torch.Size], covariance: Tensor, root: Tensor):
        self._fill(tuple(shapes), tuple(shapes), covariance, None)
        self._set_shapes(dict(shapes))
        self._root, self.details = root, {}

    def bind(self, parameters: Mapping[str, Tensor]) -> Self:
        """Itself: it has the shapes, and a copy would lose the root."""
        return self


def _jacobian(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """`[n, P]`, in the order of the parameters."""

    def output(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(model, weights, (row,)).squeeze()

    found = vmap(grad(output), in_dims=(None, 0), chunk_size=256)(parameters, x)
    return torch.cat([g.flatten(1) for g in found.values()], 1)


def _right_singular(jacobian: Tensor) -> tuple[Tensor, Tensor]:
    """`h [k]` and `V [P, k]` with `Jᵀ J = V diag(h) Vᵀ`."""
    if len(jacobian) >= jacobian.shape[1]:
        values, vectors = torch.linalg.eigh(jacobian.mT @ jacobian)
        return values.clamp(min=0), vectors
    values, left = torch.linalg.eigh(jacobian @ jacobian.mT)
    kept = values > 1e-12 * values[-1]
    values, left = values[kept], left[:, kept]
    return values, jacobian.mT @ (left / values.sqrt())


def _identity_minus(vectors: Tensor, weights: Tensor) -> Tensor:
    """`I - V diag(weights) Vᵀ` in single precision, computed in double by blocks of rows; exactly symmetric."""
    size = len(vectors)
    result = torch.empty(size, size)
    weighted = vectors * weights
    for start in range(0, size, BLOCK):
        rows = slice(start, min(start + BLOCK, size))
        block = -(weighted[rows] @ vectors[: rows.stop].mT)
        block.diagonal(start).add_(1)
        result[rows, : rows.stop] = block.float()
        result[: rows.stop, rows] = block.mT.float()
    return result


def mean_field(split: Split, sizes: Sequence[int], steps: int, seed: int) -> Fitted:
    """Variational inference with independent weights, by ivon-opt's IVON (imported here: its licence is the GPL).

    The noise takes a step of gradient of the lower bound in `log σ` along with each step of the weights.
    """
    try:
        import ivon
    except ImportError as error:
        raise DataMissing("MFVI needs IVON: pip install propagauss[ivon]") from error

    x, y = split.train
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, log_noise = mlp(sizes), torch.zeros((), requires_grad=True)
        weights = ivon.IVON(model.parameters(), ess=len(x), weight_decay=PRIOR_PRECISION / len(x), **IVON)
        noise = torch.optim.Adam([log_noise], NOISE_RATE)
        epochs = _epochs(split, steps)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(weights, epochs)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(BATCH):
                with weights.sampled_params(train=True):
                    weights.zero_grad()
                    noise.zero_grad()
                    loss = F.mse_loss(model(x[rows]), y[rows]) / (2 * (2 * log_noise).exp()) + log_noise
                    loss.backward()
                weights.step()
                noise.step()
            schedule.step()
    posterior = from_ivon(weights, model.eval())
    return Fitted(model, posterior, math.exp(log_noise.item()), PRIOR_PRECISION)
