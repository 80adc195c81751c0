"""Predictions for a whole data set, as NumPy arrays: what `Predictor.predict` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from propagauss.checks import choice, number, whole
from propagauss.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame


class Interval(NamedTuple):
    """Ends of an interval for every predicted value."""

    low: np.ndarray
    high: np.ndarray


class Predictions:
    """Predictions for `N` inputs. `len` is `N`, and every field is an array `[N, ...]`.

    Of real values: `mean` and `stddev` of the predictive, and the two variances that add up to `stddev²`: `epistemic`
    (from not knowing the weights) and `aleatoric` (noise).

    Of classes: `probabilities` `[N, ..., classes]`, the `prediction` (the most probable class), and its `entropy` in
    nats, which is the sum of `epistemic` (mutual information, BALD) and `aleatoric`. `latent_variance` is the variance
    of the logits around their mean over classes, averaged over classes: what all of them have in common changes no
    probability. Where each output is a probability of its own (one logit, or several labels), it is the variance of
    that logit, and `probabilities` has the shape of `prediction`.
    """

    mean: np.ndarray
    stddev: np.ndarray
    probabilities: np.ndarray
    prediction: np.ndarray
    entropy: np.ndarray
    epistemic: np.ndarray
    aleatoric: np.ndarray
    latent_variance: np.ndarray

    def __init__(self, arrays: Mapping[str, np.ndarray], likelihood: str, normal: bool = False):
        self._arrays = dict(arrays)
        self._likelihood, self._normal = likelihood, normal

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, np.ndarray]], likelihood: str, normal: bool) -> Predictions:
        """Of several batches."""
        joined = {}
        for name, first in parts[0].items():
            odd = next((i for i, part in enumerate(parts) if part[name].shape[1:] != first.shape[1:]), None)
            if odd is not None:
                raise InputError(
                    f"'{name}' has shape {first.shape} in batch 0 and {parts[odd][name].shape} in batch {odd}, so they "
                    "make no array: pad all sequences to one length, or predict batch by batch"
                )
            joined[name] = np.concatenate([part[name] for part in parts])
        return cls(joined, likelihood, normal)

    # -- the arrays

    def __getattr__(self, name: str) -> np.ndarray:
        arrays = self.__dict__.get("_arrays", {})
        if name in arrays:
            return arrays[name]
        raise AttributeError(f"these predictions have no '{name}': there are {', '.join(arrays)}")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the arrays."""
        return tuple(self._arrays)

    @property
    def is_classes(self) -> bool:
        return "probabilities" in self._arrays

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._arrays})

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in self._arrays.items())
        return f"Predictions({len(self):,} inputs, likelihood='{self._likelihood}': {shapes})"

    # -- what follows from them

    def interval(self, level: float = 0.95) -> Interval:
        """`mean ± z stddev`: the central interval that holds a new value with probability `level`."""
        level = _level(level)
        if self.is_classes:
            raise InputError("classes have no intervals: .set(level) is the smallest set of them that is as probable")
        if not self._normal:
            raise InputError(
                f"likelihood='{self._likelihood}' does not predict a normal distribution, of which an interval would "
                "follow from mean and stddev: draw from predictor(x).sample((1000,)) and take its quantiles"
            )
        half = float(ndtri(0.5 + level / 2)) * self.stddev
        return Interval(self.mean - half, self.mean + half)

    def set(self, level: float = 0.95) -> np.ndarray:
        """The smallest sets of classes whose probabilities add up to `level`: True for members, `[N, ..., classes]`.

        Of classes that are equally probable, those of smaller index come first. Where each output is a probability of
        its own, the classes are no and yes.
        """
        level = _level(level)
        if not self.is_classes:
            raise InputError("real values have no sets of classes: use .interval(level)")
        each = self.probabilities.astype(np.float64)
        if each.shape == self.prediction.shape:
            each = np.stack([1 - each, each], -1)
        order = np.argsort(-each, axis=-1, kind="stable")
        ranked = np.take_along_axis(each, order, -1)
        before = np.cumsum(ranked, -1) - ranked  # as long as the more probable ones do not suffice
        members = np.zeros(each.shape, dtype=bool)
        np.put_along_axis(members, order, before < level - 1e-9, -1)
        return members

    def acquire(self, count: int, by: str = "epistemic") -> np.ndarray:
        """Which `count` inputs to ask labels for: the indices of the largest scores, largest first.

        Args:
            by: "epistemic" is the mutual information of classes (BALD) and the variance of real values;
                "latent_variance" the variance of logits; "entropy" and "stddev" count the noise as well. Where an input
                has several predictions, their scores are added. Equal scores keep the order of the data.
        """
        count = whole(count, "count", 1, len(self))
        allowed = [n for n in ("epistemic", "latent_variance", "entropy", "stddev", "aleatoric") if n in self._arrays]
        scores = self._arrays[choice(by, "by", allowed)].reshape(len(self), -1).sum(1)
        return np.argsort(-scores.astype(np.float64), kind="stable")[:count]

    def to_pandas(self) -> DataFrame:
        """A row for each input; arrays of more than one number per input become columns `mean_0`, `mean_1`, ..."""
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_pandas needs the package pandas: pip install pandas") from error
        columns: dict[str, Any] = {}
        for name, values in self._arrays.items():
            inner = values.shape[1:]
            single = int(np.prod(inner)) == 1
            for at in np.ndindex(inner):
                columns[name if single else "_".join(map(str, (name, *at)))] = values[(slice(None), *at)]
        return pandas.DataFrame(columns)


def _level(level: Any) -> float:
    return number(level, "level", "a probability between 0 and 1", lambda v: 0 < v < 1)
