"""The methods on a regression problem, and the bands of the one-dimensional picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from propagauss import metrics
from propagauss.demo.data import Split
from propagauss.demo.methods import EXACT, OURS, Result, Sampler, fit_regression_sampler
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import Streamlined
from propagauss.posteriors import Posterior
from propagauss.predictive.baselines import MAP
from propagauss.predictive.regressor import Regressor


@torch.no_grad()
def compare(
    model: nn.Module,
    posteriors: Mapping[str, Posterior],
    nets: Mapping[str, Streamlined],
    split: Split,
    samples: int,
    seed: int,
    step: Callable[[str], None],
) -> list[Result]:
    """Every method on the test part; `step` is told what comes next.

    Each comes as it is (scale 1, the noise of largest marginal likelihood) and with scale and noise fitted on the
    validation part. The noise of MAP is always fitted there.
    """
    step("MAP")
    results = [_normal("MAP", "", _fitted(MAP(model), 1.0, split), split, fitted=True)]
    results[0].scale = None
    for name, posterior in posteriors.items():
        step(f"sampling, {name}")
        results += _sampling(model, name, posterior, split, samples, seed)
    exact = {name: linearise(model, posterior, split.train[0][:2]) for name, posterior in posteriors.items()}
    for method, made in ((EXACT, exact), (OURS, nets)):
        for name, posterior in posteriors.items():
            step(f"{method}, {name}")
            noise, net = posterior.details["noise"], made[name]
            results.append(_normal(method, name, Regressor(net, noise), split, fitted=False))
            results.append(_normal(method, name, _fitted(net, noise, split), split, fitted=True))
    return results


def _fitted(net: object, noise: float, split: Split) -> Regressor:
    return Regressor(net, noise).fit_scale(split.validation_loader, fit_noise=True, progress=False)


def _normal(method: str, posterior: str, regressor: Regressor, split: Split, fitted: bool) -> Result:
    x, y = split.validation
    validation = metrics.nlpd(regressor(x), y)
    x, y = split.test
    predictive = regressor(x)
    return Result(
        method,
        posterior,
        scale=regressor.scale,
        fitted=fitted,
        noise=float(regressor.noise),
        metrics={"nlpd": metrics.nlpd(predictive, y), "rmse": metrics.rmse(predictive, y)},
        validation=validation,
        losses=-predictive.log_prob(y).flatten(),
    )


def _sampling(model: nn.Module, name: str, posterior: Posterior, split: Split, samples: int, seed: int) -> list[Result]:
    x, y = split.test
    noise = posterior.details["noise"]
    sampler = Sampler(model, posterior, samples, seed)
    results = []
    for fitted, (s, stddev) in enumerate([(sampler, noise), fit_regression_sampler(sampler, *split.validation, noise)]):
        validation = -s.log_density(*split.validation, stddev).double().mean().item()
        losses = -s.log_density(x, y, stddev).flatten()
        scores = {"nlpd": losses.double().mean().item(), "rmse": metrics.rmse(s.latents(x).mean(0), y)}
        results.append(Result("sampling", name, "", s.scale, bool(fitted), stddev, scores, validation, losses))
    return results


@dataclass(frozen=True)
class Band:
    """A prediction over a grid: mean, and standard deviations without and with the noise. All `[G]`."""

    method: str
    posterior: str
    scale: float | None
    fitted: bool
    mean: Tensor
    latent: Tensor
    total: Tensor


@torch.no_grad()
def bands(
    model: nn.Module,
    posteriors: Mapping[str, Posterior],
    nets: Mapping[str, Streamlined],
    split: Split,
    grid: Tensor,
    samples: int,
    seed: int,
) -> list[Band]:
    """MAP, sampling and both engines over `grid [G, 1]`.

    Each posterior comes as it is, the last also with scale and noise fitted.
    """
    found = []
    for name, posterior in posteriors.items():
        noise = posterior.details["noise"]
        sampler = Sampler(model, posterior, samples, seed)
        for fitted in (False, True) if name == list(posteriors)[-1] else (False,):
            if fitted:
                sampler, noise = fit_regression_sampler(sampler, *split.validation, noise)
            latents = sampler.latents(grid)[..., 0]
            stddev = latents.std(0)
            total = (stddev.square() + noise**2).sqrt()
            sampled = Band("sampling", name, sampler.scale, fitted, latents.mean(0), stddev, total)
            start = posterior.details["noise"]
            exact = linearise(model, posterior, split.train[0][:2])
            others = [
                _band(method, name, _fitted(net, start, split) if fitted else Regressor(net, start), grid, fitted)
                for method, net in (("MAP", MAP(model)), (EXACT, exact), (OURS, nets[name]))
            ]
            found += [others[0], sampled, *others[1:]]
    return found


def _band(method: str, posterior: str, regressor: Regressor, grid: Tensor, fitted: bool) -> Band:
    predictive = regressor(grid)
    latent = regressor.decompose(grid).epistemic.sqrt()
    scale = None if method == "MAP" else regressor.scale
    return Band(method, posterior, scale, fitted, predictive.mean[:, 0], latent[:, 0], predictive.stddev[:, 0])
