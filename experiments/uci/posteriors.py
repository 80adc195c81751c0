"""The two posteriors of the UCI experiment: full Laplace around a trained network, and a mean field trained by IVON.

The noise is chosen on the training part in both: by the marginal likelihood, and by its lower bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.datasets import DataMissing
from propagauss.demo.data import Split
from propagauss.demo.training import BATCH, mlp, train
from propagauss.posteriors import Posterior, fit_laplace, from_ivon

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


def full_laplace(model: nn.Module, x: Tensor, y: Tensor) -> Fitted:
    """Fitted in double precision, as small variances are differences of large numbers."""
    data = [(x.double(), y.double())]
    fitted = fit_laplace(copy.deepcopy(model).double(), data, "regression", "full", progress=False)
    posterior = fitted.to(x.dtype)
    return Fitted(model, posterior, posterior.details["noise"], posterior.details["prior_precision"])


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
