"""What every posterior can do, and the one thing that rules ask of it: the layer noise.

A posterior is a zero-mean Gaussian over deviations of named parameters; its mean is the model's own parameters, which
it never holds. All sizes that only the model knows (the shapes of the parameters) come in through `bind`.
"""

from __future__ import annotations

import abc
import fnmatch
import math
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from propagauss.checks import floating, generator, kind, named, new_file, number, patterns, whole, written
from propagauss.errors import InputError, PosteriorError, nearest
from propagauss.posteriors.files import write

T = TypeVar("T")


class Noise(nn.Module):
    """Layer noise: the covariance that random `W [out, in]` and `b [out]` of one linear layer add to `W a + b`.

    With `a` of mean `m` and covariance `C`, `S = m mᵀ + C`:

        noise_kl = Σ_ij S_ij Cov(W_ki, W_lj) + Σ_i m_i (Cov(W_ki, b_l) + Cov(W_li, b_k)) + Cov(b_k, b_l)
    """

    def variance(self, m: Tensor) -> Tensor:
        """Diagonal of the layer noise for a deterministic input: `m [..., in] -> [..., out]`.

        Input variances `v` add `v @ weight_variance.T`, whatever the structure.
        """
        raise NotImplementedError

    def for_covariance(self, random_input: bool) -> Noise:
        """The same noise, with what `covariance` needs precomputed; call it before `covariance`."""
        return self

    def weight_variance(self) -> Tensor | None:
        """Marginal variances of the weight, `[out, in]`; None if the weight is deterministic."""
        raise NotImplementedError

    def covariance(self, left: Tensor, right: Tensor, c: Tensor | None) -> Tensor:
        """Layer noise between the outputs at two positions that share the layer; the same position for a single input.

        `left`, `right`: means `[..., in]`; `c`: their covariance `[..., in, in]`, None if they are deterministic.
        Leading dimensions broadcast. Returns `[..., out, out]`.
        """
        raise NotImplementedError


class Posterior(abc.ABC):
    """A Gaussian over named parameters of a model, centred at the model's own values."""

    kind: str
    shapes: dict[str, torch.Size] | None
    details: dict[str, float]
    fitted_on: Mapping[str, str] = MappingProxyType({})  # checksums of the model's weights; see fingerprint.py

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The parameters that are random, as in `model.named_parameters()`."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype: ...

    # -- the maths that predictions need

    @abc.abstractmethod
    def noise(self, weight: str | None, bias: str | None, transposed: bool = False) -> Noise:
        """The layer noise of a linear layer; `transposed` if the weight is stored as `[in, out]`."""

    @abc.abstractmethod
    def covariance(self, name: str) -> Tensor:
        """Dense covariance of one parameter, flattened row by row: `[numel, numel]`."""

    def between(self, first: str, second: str) -> Tensor | None:
        """Dense covariance between two parameters, each flattened: `[numel, numel']`; None if they are independent."""
        return None

    @abc.abstractmethod
    def variance(self, name: str) -> Tensor:
        """Marginal variances of one parameter, in its own shape."""

    @abc.abstractmethod
    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Deviations from the mean: `{name: [count, *shape]}`."""

    @abc.abstractmethod
    def quadratic(self, jacobian: Mapping[str, Tensor]) -> Tensor:
        """`J Σ Jᵀ` for a Jacobian given per parameter as `[B, C, *shape]`: `[B, C, C]`."""

    @abc.abstractmethod
    def to_dense(self) -> Tensor:
        """Joint covariance of all parameters in the order of `names`, each flattened row by row."""

    # -- the same object, changed

    @abc.abstractmethod
    def _keep(self, names: tuple[str, ...]) -> Self: ...

    def scale(self, factor: float) -> Self:
        """Covariance multiplied by `factor`."""
        need = "a finite number that is not negative"
        return self._scaled(number(factor, "the factor of a covariance", need, lambda v: v >= 0, PosteriorError))

    @abc.abstractmethod
    def _scaled(self, factor: float) -> Self: ...

    @abc.abstractmethod
    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast, as `Tensor.to` does."""

    @abc.abstractmethod
    def _bound(self, shapes: dict[str, torch.Size]) -> Self: ...

    @abc.abstractmethod
    def _check_shape(self, name: str, shape: torch.Size) -> None: ...

    # -- how it is stored

    @abc.abstractmethod
    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...

    @classmethod
    @abc.abstractmethod
    def _from_state(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> Posterior: ...

    # -- shared

    def select(self, *given: str | Iterable[str]) -> Self:
        """The marginal posterior of the parameters whose names match any of the glob patterns, or lists of them."""
        found = patterns(given, "select()", next(iter(self.names), "*"), PosteriorError)
        kept = tuple(n for n in self.names if any(fnmatch.fnmatchcase(n, p) for p in found))
        for pattern in found:
            if not fnmatch.filter(self.names, pattern):
                raise PosteriorError(
                    f"no parameter of the posterior matches '{pattern}'{nearest(pattern, self.names)} "
                    f"(it has {_listing(self.names)})"
                )
        return self._keep(kept)

    def bind(self, parameters: Mapping[str, Tensor]) -> Self:
        """Check the posterior against a model's parameters; returns it with their shapes, on their device."""
        named(parameters, "parameters", "dict(model.named_parameters())", PosteriorError)
        for name in self.names:
            if name not in parameters:
                raise PosteriorError(
                    f"the posterior names '{name}', which is not a parameter of the model{nearest(name, parameters)} "
                    f"(named_parameters() has {_listing(parameters)})"
                )
        known = [parameters[n] for n in self.names]
        for name, parameter in zip(self.names, known, strict=True):
            if not isinstance(parameter, Tensor) or not parameter.is_floating_point():
                what = parameter.dtype if isinstance(parameter, Tensor) else kind(parameter)
                raise PosteriorError(
                    f"'{name}' is {what} in the model; only real floating-point parameters can be random: leave it out "
                    "of the posterior"
                )
            if parameter.dtype != self.dtype:
                raise PosteriorError(
                    f"'{name}' is {parameter.dtype} in the model but {self.dtype} in the posterior: "
                    f"convert with posterior.to({parameter.dtype})"
                )
        shapes = {n: p.shape for n, p in zip(self.names, known, strict=True)}
        bound = self._bound(self._all_shapes(parameters) | shapes)
        for name, shape in shapes.items():
            bound._check_shape(name, shape)
        return bound.to(known[0].device) if known else bound

    def _all_shapes(self, parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        """Shapes that the structure needs beyond those of `names`."""
        return {}

    def shape(self, name: str) -> torch.Size:
        """Shape of one parameter; known once the posterior was bound to a model."""
        if self.shapes is None or name not in self.shapes:
            raise PosteriorError(
                f"the shape of '{name}' is not known to this {type(self).__name__}: "
                "call posterior.bind(dict(model.named_parameters())) first"
            )
        return self.shapes[name]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a safetensors file, whole or not at all; read it back with `load_posterior`."""
        target = new_file(path, "the path of the posterior", PosteriorError)
        tensors, meta = self._state()
        meta = meta | {"fitted_on": dict(self.fitted_on)}
        meta = meta | {"details": self.details, "shapes": {k: list(v) for k, v in (self.shapes or {}).items()}}
        with written(target, PosteriorError):
            write(target, self.kind, tensors, meta)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.names)} parameters, {self.dtype}: {_listing(self.names)})"


def as_posterior(value: Any) -> Posterior:
    if not isinstance(value, Posterior):
        raise InputError(
            f"the posterior is {kind(value)}; give a DiagonalPosterior, KroneckerPosterior or FullPosterior, or what "
            "fit_laplace, from_laplace, from_ivon, from_swag or load_posterior returns"
        )
    return value


class ByName(dict[str, T]):
    """Something for each parameter of a posterior."""

    def __missing__(self, name: Any) -> T:
        raise unknown(name, self)


def unknown(name: Any, names: Iterable[str]) -> PosteriorError:
    close = nearest(name, names) if isinstance(name, str) else ""
    return PosteriorError(f"{name!r} is not a parameter of this posterior{close} (it has {_listing(names)})")


def check_draws(count: Any, source: Any) -> int:
    """How many samples are asked for."""
    generator(source, PosteriorError)
    return whole(count, "count", error=PosteriorError)


def jacobian_of(posterior: Posterior, jacobian: Any) -> Mapping[str, Tensor]:
    """A Jacobian that has all of the parameters."""
    named(jacobian, "Jacobians", "{'weight': [B, C, *shape]}", PosteriorError)
    for name in posterior.names:
        if name not in jacobian:
            raise PosteriorError(f"the Jacobian of '{name}' is missing: give one [B, C, *shape] per parameter")
        found = floating(jacobian[name], f"the Jacobian of '{name}'", PosteriorError)
        shape = (posterior.shapes or {}).get(name, found.shape[2:])
        if found.dim() < 2 or found.shape[2:].numel() != shape.numel():
            raise PosteriorError(
                f"the Jacobian of '{name}' has shape {tuple(found.shape)}; it must be [B, C, *shape], where the "
                f"parameter has the shape {tuple(shape)}"
            )
    return jacobian


def flat(t: Tensor, lead: int = 0) -> Tensor:
    """All dimensions after the first `lead` as one; a parameter without dimensions is one entry."""
    return t.reshape(*t.shape[:lead], math.prod(t.shape[lead:]))


def _listing(names: Any, most: int = 6) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f", ... ({len(names)} in all)" if len(names) > most else "")
