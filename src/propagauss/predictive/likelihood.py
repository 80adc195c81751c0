"""From the latent Gaussian of a net to a predictive distribution: `Classifier` and `Regressor`."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MultivariateNormal, Normal

from propagauss.errors import InputError, nearest
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, call
from propagauss.predictive.calibration import (
    FitReport,
    check_finite,
    check_noise,
    check_positive,
    class_spread,
    fit_class_scale,
    fit_regression_scale,
)
from propagauss.predictive.export import export
from propagauss.predictive.links import LINKS, Link, categorical, monte_carlo


class Likelihood(nn.Module):
    """A net, and the one number that multiplies the covariance of its latent."""

    covariance_scale: Tensor
    fit_report: FitReport | None

    def __init__(self, net: Any, scale: float = 1.0):
        super().__init__()
        if not callable(net):
            raise InputError(f"net must map inputs to a Gaussian, got a {type(net).__name__}")
        self.net = net
        self.fit_report = None
        self.register_buffer("covariance_scale", torch.ones((), dtype=torch.float64))
        self.scale = scale

    @property
    def scale(self) -> float:
        """The number that multiplies the latent covariance."""
        return float(self.covariance_scale)

    @scale.setter
    def scale(self, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"scale is {value}; it must be a positive number")
        self.covariance_scale.fill_(value)

    def latent(self, *x: Any, **named: Any) -> Gaussian:
        """The latent Gaussian, with the scale applied; an error if it is not finite."""
        return check_finite(self.unchecked(*x, **named), (x, named))

    def unchecked(self, *x: Any, **named: Any) -> Gaussian:
        """The latent Gaussian, with the scale applied, finite or not."""
        return self._scaled(as_latent(call(self.net, *x, **named)))

    def export(self, path: str | os.PathLike[str], *, covariance: bool = False) -> Path:
        """Write the predictor as a torch.export archive (`.pt2`) or an ONNX graph (`.onnx`); returns the path.

        Inputs are those of the net as plain tensors (a Gaussian input is two, mean and variance); outputs are `mean`
        and `variance` of the latent with the scale applied, and what the predictor makes of them (see its class).
        Neither file needs propagauss to run, and the batch is open if it is in the net.

        Args:
            covariance: also return the `covariance` of the latent, `[batch, n, n]`.
        """

        def outputs(latent: Gaussian) -> dict[str, Tensor]:
            scaled = self._scaled(latent)
            return self._outputs(scaled) | ({"covariance": scaled.covariance} if covariance else {})

        return export(self.net, path, outputs, self._details())

    def _scaled(self, latent: Gaussian) -> Gaussian:
        return latent.scale(self.covariance_scale.to(latent.device, latent.dtype))

    def _outputs(self, latent: Gaussian) -> dict[str, Tensor]:
        """What an exported predictor returns, from the latent with the scale applied."""
        raise NotImplementedError

    def _details(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}" + (f"\n# {self.fit_report}" if self.fit_report else "")


class Classifier(Likelihood):
    """`p(y | x) = E[softmax(f)_y]`, `f ~ N(mean, scale · covariance)`, the expectation approximated by a link.

    Args:
        net: maps inputs to a Gaussian over logits, `[batch, ..., classes]`.
        link: "probit" (the paper), "mean_field", "monte_carlo" or "bridge"; `propagauss.links` says when each is bad.
        scale: multiplies the latent covariance; see `fit_scale`.
        samples, seed: the draws of the "monte_carlo" link.

    Calling it returns a `Categorical`; `log_probs` is the same as a tensor. Inputs go to the net as they are: a tensor,
    or a tuple or dict of them.
    """

    def __init__(
        self,
        net: Any,
        link: Literal["probit", "mean_field", "monte_carlo", "bridge"] = "probit",
        scale: float = 1.0,
        samples: int = 512,
        seed: int = 0,
    ):
        super().__init__(net, scale)
        if link not in LINKS:
            raise InputError(f"there is no link {link!r}{nearest(link, LINKS)} (there are {', '.join(LINKS)})")
        if samples < 2:
            raise InputError(f"samples is {samples}; the Monte Carlo link needs at least 2")
        self.link = link
        self._link: Link = LINKS[link]
        if link == "monte_carlo":
            self._link = functools.partial(monte_carlo, samples=samples, seed=seed)

    def log_probs(self, *x: Any, **named: Any) -> Tensor:
        """Log-probabilities of the classes, finite and normalised: `[batch, ..., classes]`."""
        return self.log_probs_of(self.latent(*x, **named))

    def log_probs_of(self, latent: Gaussian) -> Tensor:
        """As `log_probs`, from the latent Gaussian."""
        if latent.mean.dim() < 2 or latent.mean.shape[-1] < 2:
            raise InputError(
                f"the net returned logits of shape {tuple(latent.shape)}; a Classifier needs [batch, ..., classes] "
                "with two classes or more: give a model with one logit a second one that is always zero"
            )
        return self._link(latent.mean, class_spread(latent, self._uses_covariances))

    def forward(self, *x: Any, **named: Any) -> Categorical:
        return categorical(self.log_probs(*x, **named))

    def fit_scale(self, loader: Iterable[Any], progress: bool = True) -> Self:
        """Set `scale` to the minimiser of the mean NLPD over the `(x, y)` batches of `loader` (held-out data).

        `fit_report` says what it did. Changes neither the arg max of "mean_field" for two classes nor, by much, that of
        the others; it cannot mend wrong means.
        """
        report = fit_class_scale(self.net, loader, self._link, self.scale, self._uses_covariances, progress)
        self.scale, self.fit_report = report.after, report
        return self

    def _outputs(self, latent: Gaussian) -> dict[str, Tensor]:
        probabilities = self.log_probs_of(latent).exp()
        return {"mean": latent.mean, "variance": latent.variance, "probabilities": probabilities}

    def _details(self) -> dict[str, Any]:
        return super()._details() | {"predictor": "Classifier", "link": self.link}

    @property
    def _uses_covariances(self) -> bool:
        return self.link != "probit"

    def extra_repr(self) -> str:
        return f"link={self.link!r}, {super().extra_repr()}"


class Decomposition(NamedTuple):
    """Variances that add up to that of the prediction."""

    epistemic: Tensor  # of the latent: from not knowing the weights
    aleatoric: Tensor  # of the noise: remains however much data there is


class Regressor(Likelihood):
    """`p(y | x) = N(y; mean, scale · variance + noise²)`.

    Args:
        net: maps inputs to a Gaussian, `[batch, ..., outputs]`.
        noise: standard deviation of the observations, one number or one per output; None is no noise, until
            `fit_scale(loader, fit_noise=True)` finds it (one per output).
        scale: multiplies the latent variance; see `fit_scale`.
    """

    noise_stddev: Tensor

    def __init__(self, net: Any, noise: float | Tensor | None = None, scale: float = 1.0):
        super().__init__(net, scale)
        stddev = torch.as_tensor(0.0 if noise is None else noise, dtype=torch.float64).detach().clone()
        if stddev.dim() > 1 or not (stddev.isfinite() & (stddev >= 0)).all():
            raise InputError(f"noise is {noise}; it must be a standard deviation, or one per output, none negative")
        self.register_buffer("noise_stddev", stddev)

    @property
    def noise(self) -> float | Tensor:
        """Standard deviation of the observations: a number, or `[outputs]`."""
        return self.noise_stddev.clone() if self.noise_stddev.dim() else float(self.noise_stddev)

    def decompose(self, *x: Any, **named: Any) -> Decomposition:
        """Variance of the prediction by origin, each in the shape of the mean."""
        return self._decompose(self.latent(*x, **named))

    def forward(self, *x: Any, **named: Any) -> Normal:
        latent = self.latent(*x, **named)
        variance = sum(self._decompose(latent))
        assert isinstance(variance, Tensor)
        if not torch.compiler.is_compiling():
            check_positive(variance)
        return Normal(latent.mean, variance.sqrt())

    def joint(self, *x: Any, **named: Any) -> MultivariateNormal:
        """All outputs of a sample together, flattened, with the covariance that the latent has between them."""
        latent = self.latent(*x, **named)
        noise = self._decompose(latent).aleatoric.flatten(1)
        return MultivariateNormal(latent.mean.flatten(1), latent.covariance + torch.diag_embed(noise))

    def fit_scale(self, loader: Iterable[Any], fit_noise: bool = False, progress: bool = True) -> Self:
        """Set `scale`, and `noise` if asked, to the minimiser of the mean NLPD over the `(x, y)` batches of `loader`.

        With `fit_noise`, `noise` keeps its form: one number, or one per output (as it also is if none was given).
        `fit_report` says what was done.
        """
        noise = self.noise_stddev if self.noise_stddev.any() else None
        report = fit_regression_scale(self.net, loader, noise, self.scale, fit_noise, progress)
        self.scale, self.fit_report = report.after, report
        if report.noise is not None:
            self.noise_stddev = report.noise.to(self.noise_stddev)
        return self

    def _outputs(self, latent: Gaussian) -> dict[str, Tensor]:
        epistemic, aleatoric = self._decompose(latent)
        return {"mean": latent.mean, "variance": epistemic + aleatoric, "epistemic_variance": epistemic}

    def _details(self) -> dict[str, Any]:
        return super()._details() | {"predictor": "Regressor", "noise": self.noise_stddev.tolist()}

    def _decompose(self, latent: Gaussian) -> Decomposition:
        noise = self.noise_stddev.to(latent.device, latent.dtype)
        check_noise(noise, latent.shape)
        return Decomposition(latent.variance, noise.square().expand(latent.shape))

    def extra_repr(self) -> str:
        noise = ", ".join(f"{n:.4g}" for n in self.noise_stddev.flatten().tolist())
        return f"noise={f'[{noise}]' if self.noise_stddev.dim() else noise}, {super().extra_repr()}"
