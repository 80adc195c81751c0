"""What `fidelity` returns: two numbers, a table with a row for each parameter, a figure, and a word of advice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from propagauss.errors import InputError, nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INPUTS, BETWEEN = "(inputs)", "(between parameters)"  # rows of the table that are no parameters
CLOSE, RANKED = 1.2, 0.9  # a size within this factor, and a rank correlation of this or more, are fine
FEW = 100  # outputs, for which linearise is the first advice


@dataclass(frozen=True)
class Part:
    """One source of variance: a parameter, or the uncertain inputs, or what parameters have in common."""

    name: str
    share: float  # of the exact variance, summed over inputs and outputs
    arrives: float  # its standard deviation in the network over its exact one; nan where that is zero

    @property
    def lost(self) -> float:
        """The share of the exact variance that is missing in the network, or is too much, because of this one."""
        return 0.0 if math.isnan(self.arrives) else abs(self.share) * abs(1 - self.arrives**2)

    @property
    def row(self) -> tuple[str, str, str]:
        return self.name, f"{self.share:.1%}", "-" if math.isnan(self.arrives) else f"{self.arrives:.2f}"


@dataclass(frozen=True)
class Table:
    """Rows in the order of the posterior; `table["0.weight"]` finds one by name.

    Shares add up to 1. If parameters depend on each other in the posterior, the row "(between parameters)" has what
    their own shares leave, which can be negative; if inputs are uncertain, the row "(inputs)" has their share.
    """

    rows: tuple[Part, ...]

    def __iter__(self) -> Iterator[Part]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: int | str) -> Part:
        if isinstance(which, int) and -len(self.rows) <= which < len(self.rows):
            return self.rows[which]
        found = next((row for row in self.rows if row.name == which), None)
        if found is None:
            close = nearest(which, [row.name for row in self.rows]) if isinstance(which, str) else ""
            raise InputError(f"the table has no row {which!r}{close} (it has {len(self.rows)} rows)")
        return found

    def __str__(self) -> str:
        header = ("parameter", "share of variance", "sd that arrives")
        cells = [header, *(row.row for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
        lines = [f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}" for a, b, c in cells]
        return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


@dataclass(frozen=True, eq=False)
class Fidelity:
    """The standard deviations of a network beside the exact first-order ones; `print` shows it as a table."""

    sd_ratio: float  # root mean square of the network's standard deviations over that of the exact ones
    rank_correlation: float  # Spearman's, over inputs, of standard deviations averaged over outputs; nan if all equal
    by_parameter: Table  # empty if it was not asked for
    sd: Tensor = field(repr=False)  # [N], the network's for each input, averaged over outputs
    exact_sd: Tensor = field(repr=False)  # [N]
    outputs: int  # entries of the output for each input
    linearised: bool  # whether the network is itself from `linearise`

    @property
    def is_fine(self) -> bool:
        """Whether size and ranking are both close to exact."""
        return self._right_size and not self.rank_correlation < RANKED

    @property
    def _right_size(self) -> bool:
        return 1 / CLOSE <= self.sd_ratio <= CLOSE

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two."""
        if self.linearised:
            return "Fine: a linearised network is exact to first order."
        if self.is_fine:
            return "Fine: size and ranking of the standard deviations are close to exact."
        return f"{self._complaint} {self._remedy}"

    @property
    def _complaint(self) -> str:
        size = f"the standard deviations have {self.sd_ratio:.2g} times their exact size"
        ranks = f"inputs are not ranked as they should be (rank correlation {self.rank_correlation:.2f})"
        if self._right_size:
            return f"Not fine: {ranks}."
        if self.rank_correlation < RANKED:
            return f"Not fine: {size}, and {ranks}."
        return f"Only the ranking can be trusted: {size}. A scale fitted on held-out data corrects that."

    @property
    def _remedy(self) -> str:
        """The exact engine where it is cheap, else fewer random layers."""
        worst = max(self.by_parameter, key=lambda row: row.lost, default=None)
        layers = "make fewer layers random"
        if worst is not None and worst.lost > 0:
            layers += f" (most goes wrong in '{worst.name}')"
        if self.outputs <= FEW:
            return f"Use pg.linearise, which is exact, or {layers}."
        return f"{layers.capitalize()}; pg.linearise is exact, but its cost grows with the {self.outputs:,} outputs."

    def __str__(self) -> str:
        ranks = "undefined" if math.isnan(self.rank_correlation) else f"{self.rank_correlation:.2f}"
        lines = [
            f"standard deviations over exact ones: {self.sd_ratio:.2f}",
            f"rank correlation over {len(self.sd)} input{'s' * (len(self.sd) != 1)}: {ranks}",
        ]
        table = [str(self.by_parameter)] if len(self.by_parameter) else []
        return "\n".join([*table, *lines, self.advice])

    def plot(self) -> Figure:
        """Exact against predicted standard deviations, an input a point; and the table as bars. Needs matplotlib."""
        from propagauss.tasks.plots import agreement, as_numpy

        rows = [(row.name, row.share, row.arrives) for row in self.by_parameter]
        return agreement(as_numpy(self.exact_sd), as_numpy(self.sd), rows)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation of two vectors `[N]`, ties with their mean rank; nan where one of them does not vary."""
    if min(_variation(first), _variation(second)) < 1e-6:
        return math.nan
    return float(torch.corrcoef(torch.stack([_ranks(first), _ranks(second)]))[0, 1])


def _variation(values: Tensor) -> float:
    """Range relative to the largest; below rounding there is no order to speak of."""
    largest = float(values.abs().max())
    return float(values.max() - values.min()) / largest if largest else 0.0


def _ranks(values: Tensor) -> Tensor:
    _, which, counts = values.double().unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[which].double()
