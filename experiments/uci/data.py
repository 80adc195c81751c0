"""The eleven UCI regression sets: how their columns become numbers, and the folds.

The paper does not say how it encodes text, fills gaps or which columns it leaves out; `CHOICES` says what is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.model_selection import KFold, train_test_split

from experiments import datasets
from experiments.frame.experiment import Context
from propagauss.demo.data import Pair, Split

FOLDS, VALIDATION = 5, 0.2
CHOICES = (
    "Text columns become one number each, so that the number of inputs is the paper's: months and days in the order of "
    "the calendar, age groups by age, all other text by the alphabet (servo: motor and screw A to E; itt: gender and "
    "ethnicity; cac: the name of the community). Columns are those of the files: cac keeps the five that UCI calls "
    "non-predictive (state, county, community, communityname, fold), which the paper's 127 include; ld is without its "
    "selector, itt without SubjectID, pt without subject# (33 and 19 inputs, as in the paper). Targets: aveOralM for "
    "itt, total_UPDRS for pt, the burnt area itself (no logarithm) for ff. Gaps are filled with the mean of the "
    "training part. Inputs and targets are standardised with mean and standard deviation of the training part; NLPD "
    "and RMSE are in those units. Five folds after shuffling; a fifth of each training fold is split off as validation "
    "part, on which nothing but scales (and the noise of MAP) is fitted."
)
_ORDERS = (
    ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    ("mon", "tue", "wed", "thu", "fri", "sat", "sun"),
    ("18-20", "21-25", "26-30", "21-30", "31-40", "41-50", "51-60", ">60"),
)


@dataclass(frozen=True)
class Set:
    """A set as in the paper's table:uci-dataset."""

    name: str
    title: str
    n: int
    d: int
    hidden: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.d, *self.hidden, 1)

    @property
    def parameters(self) -> int:
        return sum((i + 1) * o for i, o in zip(self.sizes, self.sizes[1:], strict=False))


SETS = {
    s.name: s
    for s in (
        Set("servo", "Servo", 167, 4, (50,)),
        Set("ld", "Liver Disorders", 345, 5, (50,)),
        Set("am", "Auto MPG", 398, 7, (50,)),
        Set("rev", "Real Estate Valuation", 414, 6, (50,)),
        Set("ff", "Forest Fires", 517, 12, (50,)),
        Set("itt", "Infrared Thermography Temperature", 1020, 33, (100,)),
        Set("ccs", "Concrete Compressive Strength", 1030, 8, (100,)),
        Set("asn", "Airfoil Self-Noise", 1503, 5, (100,)),
        Set("cac", "Communities and Crime", 1994, 127, (100,)),
        Set("pt", "Parkinsons Telemonitoring", 5875, 19, (50, 50)),
        Set("ccpp", "Combined Cycle Power Plant", 9568, 4, (50, 50)),
    )
}


def load(context: Context, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[n, d]`, with NaN for gaps, and targets `[n]`."""
    table = datasets.uci(context, name)
    return np.stack([encode(c) for c in table.columns], 1), np.asarray(table.target, dtype=float)


def encode(column: np.ndarray) -> np.ndarray:
    """Numbers as they are; text as its place in an order that is known, else by the alphabet; empty as NaN."""
    if column.dtype.kind == "f":
        return column
    found = sorted({str(v) for v in column if str(v).strip()})
    order: Sequence[str] = next((o for o in _ORDERS if set(found) <= set(o)), found)
    place = {value: float(i) for i, value in enumerate(order)}
    return np.array([place.get(str(v), np.nan) for v in column])


def split(x: np.ndarray, y: np.ndarray, fold: int, seed: int, rows: int | None = None) -> Split:
    """One fold: the rest is cut into training and validation part; `rows` takes fewer rows of the set."""
    chosen = np.random.default_rng(seed).permutation(len(x))[:rows]
    train, test = list(KFold(FOLDS).split(chosen))[fold]
    train, validation = train_test_split(train, test_size=VALIDATION, random_state=seed)
    return _standardise(x, y, [chosen[np.asarray(part)] for part in (train, validation, test)])


def _standardise(x: np.ndarray, y: np.ndarray, parts: Sequence[np.ndarray]) -> Split:
    train = parts[0]
    mean = np.nanmean(x[train], 0)
    x = np.where(np.isnan(x), mean, x)
    stddev = x[train].std(0)
    x = (x - mean) / np.where(stddev > 1e-12, stddev, 1)
    y = ((y - y[train].mean()) / y[train].std())[:, None]

    def pair(rows: np.ndarray) -> Pair:
        return torch.as_tensor(x[rows], dtype=torch.float32), torch.as_tensor(y[rows], dtype=torch.float32)

    return Split(pair(parts[0]), pair(parts[1]), pair(parts[2]))
