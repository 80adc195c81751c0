"""The methods that streamlined prediction is compared with.

Each maps inputs to a Gaussian latent, as a streamlined net does, so that `Classifier`, `Regressor` and `fit_scale` work
on it; `MonteCarlo` also predicts on its own, and `TemperatureScaling` only does that. None changes the model. Moment
matching is not here: it is `pg.streamline(..., activation="moments")`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal
from torch.func import functional_call, jacrev, vmap
from torch.utils import _pytree as pytree

from propagauss.alone import ALONE
from propagauss.checks import choice, positive, tensor, whole
from propagauss.checks import seed as checked_seed
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import arguments, as_model, as_tensor, call, check_eval, explained
from propagauss.likelihoods.gaussian import check_noise, check_positive, standard_deviation
from propagauss.likelihoods.links import categorical
from propagauss.posteriors import Posterior
from propagauss.posteriors.base import as_posterior
from propagauss.predictive.calibration import FitReport, fit_temperature

_BUDGET = 2**25  # numbers held at once where a chunk size is not given: 128 MB in single precision


_Forward = Callable[[dict[str, Tensor]], Tensor]


class MAP:
    """`N(model(x), 0)`: the model as it is, without uncertainty about its weights."""

    def __init__(self, model: nn.Module):
        self.model = as_model(model, scripted=True)
        check_eval(self.model)

    def __call__(self, *x: Any, **named: Any) -> Gaussian:
        check_eval(self.model)
        mean = _output(self.model, *x, **named)
        return Gaussian.diagonal(mean, torch.zeros_like(mean))


class TemperatureScaling:
    """`softmax(model(x) / temperature)` (Guo et al., 2017); `fit` finds the temperature on held-out data."""

    def __init__(self, model: nn.Module, temperature: float = 1.0):
        self.model = as_model(model, scripted=True)
        check_eval(self.model)
        self.temperature = positive(temperature, "temperature")
        self.fit_report: FitReport | None = None

    def fit(self, loader: Iterable[Any], progress: bool = True) -> Self:
        """Set `temperature` to the minimiser of the mean NLPD over the `(x, y)` batches of `loader`."""
        check_eval(self.model)
        self.fit_report = fit_temperature(self.model, loader, self.temperature, progress)
        self.temperature = self.fit_report.after
        return self

    def __call__(self, *x: Any, **named: Any) -> Categorical:
        check_eval(self.model)
        return categorical(_output(self.model, *x, **named) / self.temperature)


class MonteCarlo:
    """`f(x, w_s)`, `w_s ~ posterior`, `s = 1..samples`: the same weights for every `x`.

    Weights are drawn again from the seed at each call, `chunk` samples at a time, so that memory does not grow with
    `samples` (by default as many as fit a fixed budget). The draws depend on seed and chunk only. Errors fall with
    `1/√samples`; a posterior that is wide where the network is far from linear gives predictions much worse than the
    model's own.

    Args:
        covariance: "diagonal" or "full", for the Gaussian that a call returns.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        samples: int = 1000,
        seed: int = 0,
        chunk: int | None = None,
        covariance: Literal["diagonal", "full"] = "diagonal",
    ):
        self.samples, self.seed = whole(samples, "samples", 1), checked_seed(seed)
        self.covariance = choice(covariance, "covariance", ("diagonal", "full"))
        chunk = None if chunk is None else whole(chunk, "chunk", 1)
        self.model, self.posterior, self._means = _bind(model, posterior)
        self.chunk = min(self.samples, chunk or max(1, _BUDGET // sum(p.numel() for p in self._means.values())))
        self._vectorise = True

    @torch.no_grad()
    def latents(self, *x: Any, **named: Any) -> Tensor:
        """Outputs of the sampled networks: `[samples, batch, ...]`."""
        check_eval(self.model)
        args, kwargs = _arguments(*x, **named)

        def output(weights: dict[str, Tensor]) -> Tensor:
            with ALONE, explained(self.model, (args, kwargs)):  # the parameters are exchanged meanwhile
                return as_tensor(functional_call(self.model, weights, args, kwargs))

        # activations grow with samples times batch; rows of the first tensor stand for the batch
        rows = next((len(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()), 1)
        at_once = max(1, min(self.chunk, 2**16 // max(rows, 1)))
        return torch.cat([self._outputs(output, weights, at_once) for weights in self._weights()])

    def __call__(self, *x: Any, **named: Any) -> Gaussian:
        """Gaussian with the mean and the (unbiased) variance or covariance of the samples."""
        if self.samples < 2:
            raise InputError("a variance needs at least 2 samples")
        latents = self.latents(*x, **named)
        mean = latents.mean(0)
        if self.covariance == "diagonal":
            return Gaussian.diagonal(mean, (latents - mean).square().sum(0) / (self.samples - 1))
        deviation = (latents - mean).flatten(2)
        return Gaussian.full(mean, torch.einsum("sbi,sbj->bij", deviation, deviation) / (self.samples - 1))

    def classify(self, *x: Any, **named: Any) -> Categorical:
        """`1/S Σ_s softmax(f(x, w_s))`"""
        log_probs = self.latents(*x, **named).log_softmax(-1)
        return categorical(log_probs.logsumexp(0) - math.log(self.samples))

    def regress(self, x: Any, noise: float | Tensor) -> MixtureSameFamily:
        """`1/S Σ_s N(f(x, w_s), noise²)`, for each output; `noise` is one number or one per output."""
        latents = self.latents(x).movedim(0, -1)  # [batch, ..., samples]
        stddev = standard_deviation(noise).to(latents)
        check_noise(stddev, latents.shape[:-1])
        check_positive(stddev)
        components = Normal(latents, stddev.unsqueeze(-1).expand_as(latents))
        return MixtureSameFamily(categorical(torch.zeros_like(latents)), components)

    def _weights(self) -> Iterator[dict[str, Tensor]]:
        device = next(iter(self._means.values())).device
        generator = torch.Generator(device).manual_seed(self.seed)
        for done in range(0, self.samples, self.chunk):
            draws = self.posterior.sample(min(self.chunk, self.samples - done), generator)
            yield {name: mean + draws[name] for name, mean in self._means.items()}

    def _outputs(self, output: _Forward, weights: dict[str, Tensor], at_once: int) -> Tensor:
        if self._vectorise:
            try:
                return vmap(output, chunk_size=at_once)(weights)
            except (RuntimeError, ValueError):
                # vmap does not take every model (branches on values, some in-place ops); if the model is what is
                # wrong, the loop says so
                self._vectorise = False
        count = len(next(iter(weights.values())))
        return torch.stack([output({name: w[s] for name, w in weights.items()}) for s in range(count)])


class GLM:
    """`N(f(x), J Σ Jᵀ)`, `J = ∂f/∂w`: the model linearised in its weights (Immer et al., 2021).

    Exact for models linear in the random parameters; otherwise bad where the posterior is wide. The Jacobian of
    `chunk` inputs is held at once, `[chunk, outputs, parameters]` (by default as many as fit a fixed budget, at least
    one). Samples of a batch must not interact. Gradients flow to the inputs.

    Args:
        covariance: "full" keeps the covariance between the outputs of an input, "diagonal" only variances.
    """

    def __init__(
        self,
        model: nn.Module,
        posterior: Posterior,
        covariance: Literal["full", "diagonal"] = "full",
        chunk: int | None = None,
    ):
        self.covariance = choice(covariance, "covariance", ("diagonal", "full"))
        self.chunk = None if chunk is None else whole(chunk, "chunk", 1)
        self.model, self.posterior, self._means = _bind(model, posterior)
        self._vectorise = True

    def __call__(self, *x: Any, **named: Any) -> Gaussian:
        check_eval(self.model)
        args, kwargs = _arguments(*x, **named)
        mean = _output(self.model, *args, **kwargs)
        if not mean.dim():
            raise InputError("the model returned a tensor without dimensions; [batch, ...] is needed")
        batch, outputs = mean.shape[0], math.prod(mean.shape[1:])
        leaves, spec = pytree.tree_flatten((args, kwargs))
        batched = [isinstance(t, Tensor) and t.dim() > 0 and t.shape[0] == batch for t in leaves]
        parts = [mean.new_zeros((0, outputs, outputs))]
        size = sum(p.numel() for p in self._means.values())
        chunk = self.chunk or max(1, _BUDGET // (size * max(outputs, 1)))
        for start in range(0, batch, chunk):
            some = [t[start : start + chunk] if b else t for t, b in zip(leaves, batched, strict=True)]
            parts.append(self.posterior.quadratic(self._jacobian(some, batched, spec)))
        covariance = torch.cat(parts)
        if self.covariance == "full":
            return Gaussian.full(mean, (covariance + covariance.mT) / 2)
        return Gaussian.diagonal(mean, covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).reshape(mean.shape))

    def _jacobian(self, leaves: list[Any], batched: list[bool], spec: pytree.TreeSpec) -> dict[str, Tensor]:
        """Per parameter `[chunk, outputs, *shape]`."""

        def single(weights: dict[str, Tensor], sample: list[Any]) -> Tensor:
            parts = [t.unsqueeze(0) if b else t for t, b in zip(sample, batched, strict=True)]
            args, kwargs = pytree.tree_unflatten(parts, spec)
            with ALONE, explained(self.model, (args, kwargs)):
                return as_tensor(functional_call(self.model, weights, args, kwargs)).flatten()

        if self._vectorise:
            try:
                return vmap(jacrev(single), in_dims=(None, [0 if b else None for b in batched]))(self._means, leaves)
            except (RuntimeError, ValueError):
                self._vectorise = False  # as in MonteCarlo
        count = len(leaves[batched.index(True)])
        samples = [[t[i] if b else t for t, b in zip(leaves, batched, strict=True)] for i in range(count)]
        rows = [jacrev(single, chunk_size=1)(self._means, sample) for sample in samples]
        return {name: torch.stack([row[name] for row in rows]) for name in self._means}


def _output(model: nn.Module, *x: Any, **named: Any) -> Tensor:
    with explained(model, (x, named)):
        return as_tensor(call(model, *x, **named))


def _arguments(*x: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = arguments(*x, **named)
    for i, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
        if isinstance(leaf, Tensor):
            tensor(leaf, f"input {i}")
    return args, kwargs


def _bind(model: Any, posterior: Any) -> tuple[nn.Module, Posterior, dict[str, Tensor]]:
    """The model, the posterior with its shapes, and the means of its parameters."""
    model = as_model(model)
    check_eval(model)
    if not as_posterior(posterior).names:
        raise InputError("the posterior names no parameter, so nothing is random: use MAP(model)")
    with ALONE:
        parameters = dict(model.named_parameters())
    return model, posterior.bind(parameters), {name: parameters[name].detach() for name in posterior.names}
