"""Random models: short programs over vectors and sequences, drawn by Hypothesis and run by a module.

A program is a list of instructions. Each takes earlier values (the inputs come first) and makes one more; what it makes
is a vector `[B, D]` or a sequence `[B, T, D]`. Residual and dense connections, gates, several outputs and shared layers
arise from what it chooses to read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from referee.case import BATCH, randomise
from referee.judge import Verdict, judge_model
from referee.truth import STRUCTURES, Mode, stop

POSITIONS = 2
WIDTHS = (2, 3)
Shape = tuple[int, ...]  # of one sample

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "exp": lambda t: (0.3 * t.tanh()).exp(),
    "square": torch.square,
    "sin": torch.sin,
    "softplus": F.softplus,
    "softmax": lambda t: t.softmax(-1),
    "detach": stop,
    "dropout": lambda t: F.dropout(t, 0.5, False),
    "flip": lambda t: t.flip(-1),
    "centre": lambda t: t - t.mean(-1, keepdim=True),
    "affine": lambda t: 1.5 - 0.7 * t,
    "in place": lambda t: t.clone().mul_(0.5).add_(1.0),
    "gate itself": lambda t: t * torch.sigmoid(t),
}
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda t: t.mean(1),
    "sum": lambda t: t.sum(1),
    "max": lambda t: t.amax(1),
    "last": lambda t: t[:, -1],
    "flatten": lambda t: t.flatten(1),
}
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - 0.9 * b,
    "mul": lambda a, b: a * b,
    "gate": lambda a, b: a * torch.sigmoid(b),
    "max": torch.maximum,
    "cat": lambda a, b: torch.cat([a, b], -1),
}
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "masked": lambda w: w * torch.ones_like(w).tril(),
    "exp": lambda w: (0.5 * w).exp(),
    "centred": lambda w: w - w.mean(1, keepdim=True),
}


@dataclass(frozen=True)
class Step:
    """`op` of the values `reads`; `how` chooses among the functions of its kind, `layer` names the parameters."""

    op: str
    reads: tuple[int, ...]
    how: str = ""
    layer: str = ""
    width: int = 0


@dataclass(frozen=True)
class Program:
    inputs: tuple[Shape, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        lines = [f"v{i} = input {s}" for i, s in enumerate(self.inputs)]
        for i, s in enumerate(self.steps, start=len(self.inputs)):
            reads = ", ".join(f"v{r}" for r in s.reads)
            lines.append(
                f"v{i} = {' '.join(filter(None, (s.op, s.how, s.layer)))}({reads}){f' -> {s.width}' if s.width else ''}"
            )
        return "; ".join([*lines, f"outputs {', '.join(f'v{o}' for o in self.outputs)}"])


class Running(nn.Module):
    """The model that a program describes."""

    def __init__(self, program: Program):
        super().__init__()
        self.program = program
        self.layers = nn.ModuleDict()
        self.own = nn.ParameterDict()
        shapes: list[Shape] = list(program.inputs)
        for step in program.steps:
            self._declare(step, shapes[step.reads[0]][-1])
            shapes.append(_shape(step, [shapes[r] for r in step.reads]))

    def _declare(self, step: Step, width: int) -> None:
        if step.layer in self.layers or step.layer in self.own:
            return
        if step.op in ("linear", "shared"):
            self.layers[step.layer] = nn.Linear(width, step.width)
        elif step.op == "norm":
            makers = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
            self.layers[step.layer] = makers[step.how](width) if step.how in makers else nn.LayerNorm(width, bias=False)
        elif step.op == "attention":
            self.layers[step.layer] = nn.Linear(width, 3 * step.width)
        elif step.op == "parameter":
            self.own[step.layer] = nn.Parameter(torch.ones(width))
        elif step.op == "computed":
            self.own[step.layer] = nn.Parameter(torch.zeros(step.width, width))
        elif step.op == "conv":
            self.layers[step.layer] = nn.Conv1d(width, step.width, 3, padding=1)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for step in self.program.steps:
            values.append(self._run(step, *(values[r] for r in step.reads)))
        return tuple(values[o] for o in self.program.outputs)

    def _run(self, step: Step, a: Tensor, *more: Tensor) -> Tensor:
        if step.op in ("linear", "shared", "norm"):
            return self.layers[step.layer](a)
        if step.op == "unary":
            return UNARY[step.how](a)
        if step.op == "pool":
            return POOLS[step.how](a)
        if step.op == "join":
            return JOINS[step.how](a, *more)
        if step.op == "conv":
            return self.layers[step.layer](a.mT).mT
        if step.op == "computed":
            return F.linear(a, WEIGHTS[step.how](self.own[step.layer]))
        if step.op == "parameter":
            p = self.own[step.layer]
            return {"add": a + p, "mul": a * p, "swish": a * torch.sigmoid(p * a)}[step.how]
        assert step.op == "attention"
        q, k, v = self.layers[step.layer](a).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


def _shape(step: Step, reads: list[Shape]) -> Shape:
    first = reads[0]
    if step.op == "pool":
        return (POSITIONS * first[-1],) if step.how == "flatten" else first[1:]
    if step.op == "join" and step.how == "cat":
        return (*first[:-1], first[-1] + reads[1][-1])
    return (*first[:-1], step.width) if step.width else first


# -- drawing programs


@st.composite
def programs(draw: Any, longest: int = 7) -> Program:
    """At least one random layer; every output depends on whatever it happens to depend on."""
    inputs = tuple(
        draw(
            st.lists(st.sampled_from([(w,) for w in WIDTHS] + [(POSITIONS, w) for w in WIDTHS]), min_size=1, max_size=2)
        )
    )
    shapes: list[Shape] = list(inputs)
    steps: list[Step] = []
    for i in range(draw(st.integers(2, longest))):
        step = draw(_steps(shapes, steps, f"l{i}", random_yet=bool(steps)))
        steps.append(step)
        shapes.append(_shape(step, [shapes[r] for r in step.reads]))
    last = len(shapes) - 1
    others = list(range(len(inputs), last))
    more = draw(st.booleans()) and others
    outputs = (last, draw(st.sampled_from(others))) if more else (last,)
    return Program(inputs, tuple(steps), outputs, draw(st.integers(0, 2**16)))


@st.composite
def _steps(draw: Any, shapes: list[Shape], before: list[Step], name: str, random_yet: bool) -> Step:
    last = len(shapes) - 1
    # the newest value most often, or much of the program would be for nothing
    at = draw(st.sampled_from([last, last, last, max(last - 1, 0), max(last - 2, 0)]))
    shape = shapes[at]
    widths = st.sampled_from(WIDTHS)
    if not random_yet:
        return Step("linear", (at,), layer=name, width=draw(widths))
    kinds = ["linear", "unary", "unary", "join", "join", "norm", "parameter", "computed"]
    kinds += ["pool", "attention", "conv"] if len(shape) == 2 else []
    known = [s for s in before if s.op == "linear" and s.width]
    fitting = [s for s in known if shapes[s.reads[0]][-1] == shape[-1]]
    kinds += ["shared"] if fitting else []
    kind = draw(st.sampled_from(kinds))
    if kind == "shared":
        chosen = draw(st.sampled_from(fitting))
        return Step("shared", (at,), layer=chosen.layer, width=chosen.width)
    if kind == "join":
        alike = [i for i, s in enumerate(shapes) if s == shape]
        how = draw(st.sampled_from(sorted(JOINS)))
        return Step("join", (at, draw(st.sampled_from(alike))), how)
    if kind in ("linear", "attention", "conv"):
        return Step(kind, (at,), layer=name, width=draw(widths))
    if kind == "computed":
        return Step(kind, (at,), draw(st.sampled_from(sorted(WEIGHTS))), name, draw(widths))
    choices = {"unary": UNARY, "pool": POOLS, "norm": ("layer", "rms"), "parameter": ("add", "mul", "swish")}[kind]
    return Step(kind, (at,), draw(st.sampled_from(sorted(choices))), name if kind in ("norm", "parameter") else "")


# -- judging them


def judge_program(program: Program, mode: Mode, structure: str) -> Verdict:
    generator = torch.Generator().manual_seed(program.seed)
    model = Running(program).double().eval()
    randomise(model, generator)
    inputs = tuple(torch.randn(BATCH, *s, generator=generator, dtype=torch.float64) for s in program.inputs)
    names = [n for n, _ in model.named_parameters()]
    return judge_model(str(program), model, inputs, names, mode, structure, generator)


def try_many(count: int) -> int:
    """Prints what is wrong with `count` random models, shrunk; how many of the two modes found something."""
    wrong = 0
    modes: tuple[Mode, ...] = ("full", "diagonal")
    for mode in modes:
        try:
            _agreement(mode, count)()
        except AssertionError as error:
            print(f"random models, {mode}: {error}", file=sys.stderr)
            wrong += 1
    return wrong


def _agreement(mode: Mode, count: int) -> Any:
    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(programs(), st.sampled_from(STRUCTURES))
    def agrees(program: Program, structure: str) -> None:
        verdict = judge_program(program, mode, structure if mode == "full" else "diagonal")
        assert verdict.is_good, str(verdict)

    return agrees
