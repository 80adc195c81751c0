"""A net and a likelihood: from the latent Gaussian to a predictive distribution, calibrated and exported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from propagauss.checks import flag, from_numpy, kind, number, positive, whole
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, as_net, call, device_of, dtype_of, input_batches, taken_by
from propagauss.likelihoods import LIKELIHOODS, Decomposition, Likelihood
from propagauss.network.unpickled import Unpickled
from propagauss.predictive.calibration import TOLERANCE, FitReport, calibrate, check_finite, fit_scale
from propagauss.predictive.export import export, save
from propagauss.predictive.predictions import Predictions


class Predictor(Unpickled, nn.Module):
    """`p(y | x) = E[p(y | f)]`, `f ~ N(mean, scale · covariance)`: a net, its likelihood, and the scale of its latent.

    Args:
        net: maps inputs to a Gaussian over what the likelihood takes.
        likelihood: as in `propagauss.likelihoods`; `Classifier` and `Regressor` make their own.
        scale: multiplies the latent covariance; see `calibrate` and `fit_scale`.

    Calling it returns a distribution. Inputs go to the net as they are: a tensor, or a tuple or dict of them.
    """

    covariance_scale: Tensor
    fit_report: FitReport | None

    def __init__(self, net: Any, likelihood: Likelihood, scale: float = 1.0):
        super().__init__()
        self.net = as_net(net)
        self.fit_report = None
        self._likelihood = likelihood
        self.register_buffer("covariance_scale", torch.ones((), dtype=torch.float64))
        self.scale = scale

    @property
    def likelihood(self) -> Likelihood:
        return self._likelihood

    @property
    def scale(self) -> float:
        """The number that multiplies the latent covariance."""
        return float(self.covariance_scale)

    @scale.setter
    def scale(self, value: float) -> None:
        self.covariance_scale.fill_(positive(value, "scale"))

    def latent(self, *x: Any, **named: Any) -> Gaussian:
        """The latent Gaussian, with the scale applied; an error if it is not finite."""
        return check_finite(self.unchecked(*x, **named), (x, named))

    def unchecked(self, *x: Any, **named: Any) -> Gaussian:
        """The latent Gaussian, with the scale applied, finite or not."""
        return self.scaled(as_latent(self._likelihood.joined(call(self.net, *x, **named))))

    def forward(self, *x: Any, **named: Any) -> Distribution:
        return self.likelihood.predictive(self.latent(*x, **named))

    def decompose(self, *x: Any, **named: Any) -> Decomposition:
        """Variance of the prediction by origin, each in the shape of the mean; of classes, their entropy."""
        return self.likelihood.decompose(self.latent(*x, **named))

    @torch.no_grad()
    def predict(self, data: Any, progress: bool = True, batch_size: int = 256) -> Predictions:
        """Predictions for a whole data set, as NumPy arrays; see `Predictions`.

        Args:
            data: a loader, whose targets are not used if it has any; or all inputs at once, as a tensor, a NumPy array
                or a dictionary of tensors.
            progress: show a progress bar, if the output is a terminal.
            batch_size: how many inputs go through together if they are given at once.
        """
        rows = whole(batch_size, "batch_size", 1)
        title = "predicting" if flag(progress, "progress") else None
        inputs = input_batches(self._tensors(data), taken_by(self.net), device_of(self.net), title, rows)
        parts = [_arrays(self.likelihood.summary(self.latent(x))) for x in inputs]
        return Predictions.joined(parts, self.likelihood.name, self.likelihood.normal)

    def _tensors(self, data: Any) -> Any:
        """NumPy arrays as tensors; real numbers in the precision of the net, since NumPy's own is double precision."""
        if hasattr(data, "to_numpy"):
            raise InputError(f"the data are {kind(data)}: give its numbers, with .to_numpy()")
        if not isinstance(data, (np.ndarray, np.generic)):
            return data
        given = from_numpy(np.asanyarray(data))
        return given.to(dtype_of(self.net)) if given.is_floating_point() else given

    def fit_scale(self, loader: Iterable[Any], progress: bool = True) -> Self:
        """Set `scale` to the minimiser of the mean NLPD over the `(x, y)` batches of `loader` (held-out data).

        `fit_report` says what it did.
        """
        self.fit_report, _ = fit_scale(self.net, loader, self.likelihood, self.scale, progress=progress)
        self.scale = self.fit_report.after
        return self

    def calibrate(self, validation: Iterable[Any], tolerance: float = TOLERANCE, progress: bool = True) -> Self:
        """Set `scale` and what the likelihood has to fit (temperature, noise) on the `(x, y)` batches of held-out data.

        For every scale, the numbers of the likelihood are those of least NLPD. Of all scales up to the posterior's own,
        or the best one if that is larger, the largest is taken whose NLPD is within `tolerance` standard errors of the
        least, paired over the data points. So the plain model with a temperature is always among the candidates, and
        the variance of the posterior is kept wherever the data do not speak against it. `fit_report` says what was
        chosen, and why.

        Args:
            tolerance: 0 for the least NLPD on these data; more keeps more of the epistemic variance.
        """
        tolerance = number(tolerance, "tolerance", "a number that is not negative", lambda v: v >= 0)
        self.fit_report, fitted = calibrate(self.net, validation, self.likelihood, self.scale, tolerance, progress)
        self.scale = self.fit_report.after
        self._adopt(fitted)
        return self

    def _adopt(self, likelihood: Any) -> None:
        """Keep a likelihood whose numbers were fitted; what is a buffer is saved with the module."""
        self._likelihood = likelihood

    def export(self, path: str | os.PathLike[str], *, covariance: bool = False) -> Path:
        """Write the predictor as a torch.export archive (`.pt2`) or an ONNX graph (`.onnx`); returns the path.

        Inputs are those of the net as plain tensors (a Gaussian input is two, mean and variance); outputs are `mean`
        and `variance` of the latent with the scale applied, and what the predictor makes of them (see its class).
        Neither file needs propagauss to run, and the batch is open if it is in the net.

        Args:
            covariance: also return the `covariance` of the latent, `[batch, n, n]`; where only some outputs have one
                (`linearise(outputs=...)`), theirs, `[batch, ..., k, k]`, and their indices, `chosen`.
        """
        covariance = flag(covariance, "covariance")

        def outputs(latent: Gaussian) -> dict[str, Tensor]:
            scaled = self.scaled(latent)
            return self.likelihood.exported(scaled) | (_covariances(scaled) if covariance else {})

        return export(self.net, path, outputs, self._details(), self._likelihood.joined)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the predictor to a `.pt2` file, from which `propagauss.load` makes it again; returns the path.

        The file holds the network as a program, so that the model's class is not needed, and the numbers of the
        predictor. Reading it runs no code. `propagauss predict` takes it as well. The file is whole or not there.
        """
        likelihood = self.likelihood
        if LIKELIHOODS.get(likelihood.name) is not type(likelihood):
            raise InputError(
                f"likelihood='{likelihood.name}' is not registered, so the predictor could not be loaded again: enter "
                "its class in propagauss.likelihoods.LIKELIHOODS"
            )
        numbers = {field.name: getattr(likelihood, field.name) for field in fields(cast(Any, likelihood))}
        own = {"predictor": type(self).__name__, "likelihood": likelihood.name, "numbers": numbers, "scale": self.scale}
        return save(self.net, path, own, self._details(), likelihood.joined)

    def scaled(self, latent: Gaussian) -> Gaussian:
        """What a net returned, with the scale applied."""
        return latent.scale(self.covariance_scale.to(latent.device, latent.dtype))

    def _details(self) -> dict[str, Any]:
        own = {"scale": self.scale, "predictor": type(self).__name__, "likelihood": self.likelihood.name}
        return own | self.likelihood.details() | {"columns": json.dumps(dict(self.likelihood.columns))}

    def extra_repr(self) -> str:
        return f"scale={self.scale:.4g}" + (f"\n# {self.fit_report}" if self.fit_report else "")


def _covariances(latent: Gaussian) -> dict[str, Tensor]:
    chosen = latent.chosen
    if chosen is None:
        return {"covariance": latent.covariance}
    return {"chosen": chosen.index, "covariance": chosen.covariance}


def _arrays(found: dict[str, Tensor]) -> dict[str, np.ndarray]:
    known = (torch.float16, torch.float32, torch.float64)
    floats = {name: t if t.dtype in known or not t.is_floating_point() else t.float() for name, t in found.items()}
    return {name: t.numpy(force=True) for name, t in floats.items()}
