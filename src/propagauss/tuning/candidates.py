"""What is tried: posteriors over groups of parameters, ways to propagate them, links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from propagauss.tuning.groups import ALL, LAST_BLOCK, LAST_LAYER, groups

Fitted = Literal["diagonal", "kronecker", "full"]
Engine = Literal["plain", "streamlined", "linearised"]
PLAIN, TEMPERATURE, CALIBRATED = "plain model", "temperature scaling", "plain model, calibrated"

FULL = 2_000  # parameters, for a full covariance
MOST = 20_000_000  # parameters, for any other
LINKS = {"classification": ("mean_field", "probit"), "binary": ("probit",)}
PRIORS = (0.1, 10.0, 100.0)  # times the prior precision of largest marginal likelihood


@dataclass(frozen=True)
class Candidate:
    """One way to predict."""

    parameters: str = ""  # which group is random
    structure: Fitted | Literal[""] = ""
    engine: Engine = "plain"
    link: str = ""
    prior: float = 1.0  # times the fitted prior precision
    calibrated: bool = True

    @property
    def name(self) -> str:
        if self.engine == "plain":
            return PLAIN if not self.calibrated else TEMPERATURE if self.link else CALIBRATED
        structure = self.structure.replace("kronecker", "Kronecker")
        link = f", {self.link.replace('_', '-')}" if self.link else ""
        prior = "" if self.prior == 1 else f", prior x{self.prior:g}"
        return f"{self.parameters}, {structure}, {self.engine}{link}{prior}"

    @property
    def knows(self) -> tuple[bool, int, bool]:
        """How much its variance says of what is not known, to be compared: exact to first order, of many parameters,
        with correlations between them."""
        exact = self.engine == "linearised" or self.parameters == LAST_LAYER
        return exact, (LAST_LAYER, LAST_BLOCK, ALL).index(self.parameters), self.structure != "diagonal"

    @property
    def network(self) -> tuple[str, str, str, float]:
        """What the latents depend on."""
        return self.parameters, self.structure, self.engine, self.prior


def baselines(likelihood: str, free: bool) -> Iterator[Candidate]:
    """The plain model as it is, if that is a distribution, and with its temperature or noise fitted, if it has any."""
    link = next(iter(LINKS.get(likelihood, ("",))))
    if likelihood != "regression":
        yield Candidate(link=link, calibrated=False)
    if free:
        yield Candidate(link=link)


def posteriors(model: nn.Module, heads: int = 1) -> Iterator[tuple[str, tuple[str, ...], Fitted]]:
    """Title and names of a group, and a structure: those that are small enough, the cheap ones first."""
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    for title, names in groups(model, heads).items():
        size = sum(sizes[n] for n in names)
        if size > MOST:
            continue
        small = size <= FULL
        yield title, names, "kronecker"
        if title == ALL:
            yield title, names, "diagonal"
        if small and title != LAST_BLOCK:
            yield title, names, "full"


def engines(title: str, structure: Fitted) -> tuple[Engine, ...]:
    """A linear last layer is exact either way; a full covariance between layers is kept by `linearise` alone."""
    if title == LAST_LAYER:
        return ("streamlined",)
    return ("linearised",) if structure == "full" else ("streamlined", "linearised")
