"""One line of the battery: a small model, and what it is called with."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from referee.truth import STRUCTURES

BATCH, WIDTH = 3, 5
Part = tuple[int, ...] | Tensor | Callable[[], nn.Module]


class Formula(nn.Module):
    """`function(self, *inputs)`, with parameters (given by their shapes), buffers (tensors) and submodules."""

    def __init__(self, function: Callable[..., Any], **parts: Part):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, tuple):
                setattr(self, name, nn.Parameter(torch.zeros(part)))
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part())

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


@dataclass(frozen=True)
class Case:
    """A model and its input.

    Args:
        name: the row of the table; also the seed of weights and input.
        make: builds the model; its weights are then drawn anew.
        inputs: draws the input, a batch first.
        section: the heading under which it stands.
        random: which parameters are random; all of them if None.
        shared: a parameter is used at several places, where the library may fall back on independence.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    section: str = ""
    random: tuple[str, ...] | None = None
    shared: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def turn(self) -> str:
        """The structure of its posterior in a short run; other cases coming or going do not change it."""
        return STRUCTURES[zlib.crc32(self.name.encode()) % len(STRUCTURES)]

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
        """Model in float64 and evaluation mode, input, and the names of the random parameters."""
        generator = self.generator()
        with torch.random.fork_rng():  # some weights keep a part of what they were initialised with
            torch.manual_seed(generator.initial_seed())
            model = self.make().double().eval()
        randomise(model, generator)
        names = [n for n, _ in model.named_parameters() if self.random is None or n in self.random]
        return model, self.inputs(generator), names


@cache
def built(case: Case) -> tuple[nn.Module, tuple[Tensor, ...], list[str]]:
    """The same model and input for everyone: nobody changes them."""
    return case.build()


def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Weights of the size that training leaves, around what the initialisation has as their average."""
    with torch.no_grad():
        for p in model.parameters():
            fan = max(p[0].numel(), 1) if p.dim() > 1 else 4
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            centre = p.mean().round() if p.dim() < 2 else 0.0
            p.copy_(centre + noise / fan**0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype))


def normal(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Standard normal inputs; the shapes are those of one sample."""
    return lambda g: tuple(torch.randn(BATCH, *s, generator=g, dtype=torch.float64) for s in shapes)


def integers(high: int, *shapes: tuple[int, ...]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda g: tuple(torch.randint(high, (BATCH, *s), generator=g) for s in shapes)


def case(
    name: str,
    function: Callable[..., Any],
    *,
    x: tuple[int, ...] | Callable[[torch.Generator], tuple[Tensor, ...]] = (WIDTH,),
    random: tuple[str, ...] | None = None,
    shared: bool = False,
    **parts: Part,
) -> Case:
    """A formula of its parts `m` and the inputs, such as `case("exp", lambda m, x: m.l(x).exp(), l=linear(5, 3))`."""
    inputs = normal(x) if isinstance(x, tuple) else x
    return Case(name, lambda: Formula(function, **parts), inputs, random=random, shared=shared)


def module(name: str, make: Callable[[], nn.Module], x: Any = (WIDTH,), **settings: Any) -> Case:
    """A module of its own."""
    return Case(name, make, normal(x) if isinstance(x, tuple) else x, **settings)


def linear(inputs: int = WIDTH, outputs: int = 4, bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(inputs, outputs, bias)


def section(heading: str, *cases: Case) -> list[Case]:
    """The cases of one part of the table."""
    return [replace(c, section=heading) for c in cases]
