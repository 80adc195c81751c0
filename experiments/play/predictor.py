"""From the network to the exported predictor, and how uncertain that one is about test images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import propagauss as pg
from experiments.datasets import Images, batches
from experiments.play.network import moved

LAYERS = ("7.*", "9.*")  # the two linear ones: with them, the file stays below two megabytes
BINS = 40


def predictor(model: nn.Module, data: Images) -> pg.Classifier:
    """Laplace over the last two layers, linearised, calibrated on held-out digits as they are."""
    x, y = data.train
    posterior = pg.fit_laplace(model, batches((moved(x), y)), structure="kronecker", parameters=LAYERS, progress=False)
    net = pg.linearise(model, posterior, x[:2])
    return pg.Classifier(net, link="mean_field").calibrate(batches(data.validation), progress=False)


@torch.no_grad()
def answers(classifier: pg.Classifier, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Plain and Bayesian probabilities `[N, C]`, and the relative uncertainty `[N]`."""
    latents = [classifier.latent(some) for some in x.split(500)]
    plain = torch.cat([latent.mean.softmax(-1) for latent in latents])
    bayesian = torch.cat([classifier.log_probs_of(latent).exp() for latent in latents])
    return plain, bayesian, torch.cat([relative(latent.mean, latent.covariance) for latent in latents])


def relative(mean: Tensor, covariance: Tensor) -> Tensor:
    """`√(Σ Var[f_i - f_j] / Σ (m_i - m_j)²)` over pairs of outputs: what is uncertain of the differences between them.

    Only differences matter to probabilities. Sums over pairs are, but for a common factor, those of entries that are
    centred: `Σ_i C_ii - Σ_ij C_ij / n` and `Σ_i (m_i - m̄)²`.
    """
    uncertain = covariance.diagonal(dim1=-2, dim2=-1).sum(-1) - covariance.sum((-2, -1)) / mean.shape[-1]
    return (uncertain / (mean - mean.mean(-1, keepdim=True)).square().sum(-1)).sqrt()


def histogram(uncertainty: Tensor, low: float, high: float) -> list[float]:
    """Shares in bins of equal width on a logarithmic scale; what is outside counts at its end."""
    logs = uncertainty.double().clamp(low, high).log()
    ends = torch.tensor([low, high], dtype=torch.float64).log().tolist()
    return [round(share, 5) for share in (logs.histc(BINS, *ends) / len(logs)).tolist()]
