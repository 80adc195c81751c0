"""Ways to predict with the networks of networks.py: those of classify.py, in more forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from experiments.methods.classify import LINKS, Batches, Label, Link, Predictor, Remembered, _gaussian, plain, sampling
from propagauss.demo.methods import Sampler
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.gaussian import Gaussian
from propagauss.posteriors import KroneckerPosterior, Posterior
from propagauss.posteriors.kronecker import Eigenfactors

MONTE_CARLO_BATCHES = 4  # of validation data, for the scale of the Monte Carlo link: 50 times as dear as the others


def laplace_groups(
    model: nn.Sequential,
    posterior: KroneckerPosterior,
    validation: Batches,
    samples: int,
    links: Sequence[Link] = LINKS,
) -> Iterator[list[Predictor]]:
    """The plain model and all ways to use a Kronecker posterior around it, a few at a time: draws take much memory."""
    yield plain(model, validation)
    yield sampling(model, posterior, "LA", validation, samples)
    yield glm(model, posterior, "LA", validation)
    yield ours(model, posterior, "LA", validation, links, "exact", covariance="full")
    yield ours(model, factored(posterior), "LA", validation, links, "factored", covariance="full")
    few: list[Link] = [link for link in links if link in ("probit", "mean_field")]
    yield ours(model, posterior, "LA", validation, few, "exact, variances only")


def mfvi_groups(
    model: nn.Sequential, posterior: Posterior, validation: Batches, samples: int, links: Sequence[Link] = LINKS
) -> Iterator[list[Predictor]]:
    """The model at the mean of a mean-field posterior, and all ways to use that posterior."""
    names = {"MAP": "mean weights"}
    yield [
        replace(p, label=replace(p.label, method=names.get(p.label.method, p.label.method), posterior="MFVI"))
        for p in plain(model, validation)
    ]
    yield sampling(model, posterior, "MFVI", validation, samples)
    yield ours(model, posterior, "MFVI", validation, links)


def sampler(
    model: nn.Module, posterior: Posterior, name: str, samples: int, form: str = "", seed: int = 0
) -> Predictor:
    """The average over draws, from the posterior as it is."""
    return Predictor(Label("sampling", name, form=form, scale=1.0), Sampler(model, posterior, samples, seed).log_probs)


def glm(
    model: nn.Sequential, posterior: Posterior, name: str, validation: Batches, form: str = "", fitted: bool = True
) -> list[Predictor]:
    """As it is and, if asked, with its scale fitted."""
    fits = (False, True) if fitted else (False,)
    net = linearise(model, posterior, validation[0][0][:2])
    return gaussian(net, "GLM", name, validation, ("probit",), form, fits)


def ours(
    model: nn.Module,
    posterior: Posterior,
    name: str,
    validation: Batches,
    links: Sequence[Link] = LINKS,
    form: str = "",
    **options: Any,
) -> list[Predictor]:
    """One forward pass, its scale fitted (and, with the probit link, as it is)."""
    net = Remembered(streamline(model, posterior, validation[0][0][:2], **options))
    fitted = gaussian(net, "ours", name, validation, links, form, (True,))
    return fitted + gaussian(net, "ours", name, validation, ("probit",), form, (False,))


def gaussian(
    net: Callable[[Tensor], Gaussian],
    method: str,
    name: str,
    validation: Batches,
    links: Sequence[Link],
    form: str,
    fits: Sequence[bool],
) -> list[Predictor]:
    """A net with each of the links, with and without a fitted scale."""
    net, found = Remembered(net), []
    for link in links:
        some = validation[:MONTE_CARLO_BATCHES] if link == "monte_carlo" else validation
        found += _gaussian(net, method, name, form, some, (link,), fits)
    return found


def factored(posterior: KroneckerPosterior) -> KroneckerPosterior:
    """The paper's form of a fitted Kronecker posterior: `(B + √δ I)⁻¹ ⊗ (A + √δ I)⁻¹` for `(B ⊗ A + δ I)⁻¹`.

    A fitted posterior holds the eigenvalues of `B ⊗ A` only; those of `B` are found at the bias of the same layer.
    """
    precision, factors = posterior.details["prior_precision"], dict(posterior._factors)
    for name, f in factors.items():
        if f.right is None:
            continue
        left = (1 / factors[name.replace("weight", "bias")].variance.double() - precision).clamp(min=0)
        top = int(left.argmax())
        right = ((1 / f.variance[top].double() - precision) / left[top]).clamp(min=0)
        root = precision**0.5
        variance = 1 / torch.outer(left + root, right + root)
        factors[name] = Eigenfactors(f.left, f.right, variance.to(f.variance))
    return posterior._with(factors)
