"""Elementwise functions, one by one: of a value from a random layer, inside the function's domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from referee.case import Case, case, linear

Function = Callable[[Tensor], Tensor]


def _on(low: float, high: float, **functions: Function) -> list[Case]:
    """`f(z)` for `z` between `low` and `high`."""

    def one(name: str, f: Function) -> Case:
        middle, reach = (low + high) / 2, (high - low) / 10
        return case(name, lambda m, x: f(middle + reach * m.l(x)), l=linear())

    return [one(name, f) for name, f in functions.items()]


def _torch(*names: str) -> dict[str, Function]:
    return {name: getattr(torch, name) for name in names}


def _functional(*names: str) -> dict[str, Function]:
    return {name: getattr(F, name) for name in names}


_ANYWHERE = _torch(
    *("abs", "arctan", "asinh", "atan", "cos", "cosh", "deg2rad", "erf", "erfc", "exp", "exp2", "expm1", "neg"),
    *("positive", "relu", "sigmoid", "sin", "sinc", "sinh", "square", "tanh", "frac", "rad2deg", "nan_to_num"),
    *("sign", "sgn", "round", "floor", "ceil", "trunc", "selu", "celu"),
)
_ACTIVATIONS = _functional(
    *("elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"),
    *("relu6", "rrelu", "silu", "softplus", "softshrink", "softsign", "tanhshrink"),
)
_CALLS: dict[str, Function] = {
    "gelu, tanh": lambda z: F.gelu(z, approximate="tanh"),
    "threshold": lambda z: F.threshold(z, 0.1, -0.3),
    "clamp": lambda z: z.clamp(-0.5, 0.7),
    "clamp by tensors": lambda z: z.clamp(torch.full((4,), -0.5).to(z), torch.full((4,), 0.7).to(z)),
    "clip, one side": lambda z: z.clip(min=0.1),
    "maximum of a constant": lambda z: torch.maximum(z, torch.full_like(z, 0.1)),
    "fmin of a constant": lambda z: torch.fmin(z, torch.full_like(z, 0.1)),
    "where, by its sign": lambda z: torch.where(z > 0, z, 0.0),
    "times its own mask": lambda z: z * (z > 0),
    "masked_fill by its sign": lambda z: z.masked_fill(z < 0, 0.5),
    "pow 3": lambda z: z.pow(3),
    "constant to the power": lambda z: torch.pow(2.0, z),
    "remainder": lambda z: torch.remainder(z, 0.7),
    "fmod": lambda z: torch.fmod(z, 0.7),
    "floor divide": lambda z: z - torch.div(z, 0.7, rounding_mode="floor"),
    "copysign": lambda z: torch.copysign(torch.full_like(z, 2.0), z) + z,
    "ldexp": lambda z: torch.ldexp(z, torch.tensor(2)),
    "lerp": lambda z: torch.lerp(z, torch.full_like(z, 2.0), 0.3),
    "hypot": lambda z: torch.hypot(z, torch.full_like(z, 1.5)),
    "atan2": lambda z: torch.atan2(z, torch.full_like(z, 1.5)),
    "logaddexp": lambda z: torch.logaddexp(z, torch.full_like(z, 0.5)),
    "addcmul": lambda z: torch.addcmul(z, z, z.tanh(), value=0.5),
    "addcdiv": lambda z: torch.addcdiv(z, z, z.square() + 1, value=0.5),
    "sigmoid gate of itself": lambda z: z * torch.sigmoid(1.7 * z),
    "gelu in pieces": lambda z: 0.5 * z * (1 + torch.tanh(0.79788 * (z + 0.044715 * z.pow(3)))),
    "quotient of itself": lambda z: z / (1 + z.abs()),
    "reflected subtraction": lambda z: 1.5 - z,
    "division of a constant": lambda z: 1.5 / (z + 9),
    "float_power": lambda z: torch.float_power(z + 9, 1.5),
    "xlogy": lambda z: torch.special.xlogy(z, torch.full_like(z, 0.5)),
    "bessel_j0": torch.special.bessel_j0,
    "bessel_j1": torch.special.bessel_j1,
    "i0": torch.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "ndtr": torch.special.ndtr,
    "log_ndtr": torch.special.log_ndtr,
    "entr": lambda z: torch.special.entr(z.square() + 0.1),
}

ELEMENTWISE = [
    replace(c, section="Elementwise functions")
    for c in (
        *_on(-2.5, 2.5, **_ANYWHERE, **_ACTIVATIONS, **_CALLS),
        *_on(-0.9, 0.9, **_torch("asin", "acos", "atanh", "erfinv", "tan")),
        *_on(0.2, 0.9, **_torch("logit"), **{"ndtri": torch.special.ndtri, "log1p": torch.log1p}),
        *_on(1.2, 4.0, **_torch("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "acosh", "lgamma", "digamma")),
        *_on(1.2, 4.0, **{"pow 0.5": lambda z: z**0.5, "pow -1": lambda z: z**-1, "to itself": lambda z: z**z}),
        *_on(
            1.2,
            4.0,
            **{"mvlgamma": lambda z: torch.special.multigammaln(z, 2), "polygamma": lambda z: torch.polygamma(1, z)},
        ),
    )
]
