"""Other names of ops: `multiply` is `mul`. The rule of the one is the rule of the other.

The fact `same_as` is for graph passes too: an op by its plain name is recognised (as elementwise, in patterns) where
the alias, which PyTorch does not tag, is not.
"""

from __future__ import annotations

from typing import Any

import torch

from propagauss.rules.facts import facts, state
from propagauss.rules.registry import FUNCTIONS

aten = torch.ops.aten

_SAME_OVERLOADS = {
    "multiply": "mul",
    "divide": "div",
    "subtract": "sub",
    "true_divide": "div",
    "negative": "neg",
    "clip": "clamp",
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctanh": "atanh",
    "arctan2": "atan2",
    "fix": "trunc",
    "special_expit": "sigmoid",
    "special_exp2": "exp2",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_logit": "logit",
    "special_sinc": "sinc",
    "special_i0": "i0",
    "special_digamma": "digamma",
    "special_gammaln": "lgamma",
    "special_polygamma": "polygamma",
    "special_round": "round",
    "special_logsumexp": "logsumexp",
    "moveaxis": "movedim",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "concat": "cat",
    "concatenate": "cat",
    "ger": "outer",
    "trapz": "trapezoid",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
}
_OTHER_OVERLOADS = {
    aten.max.other: aten.maximum.default,
    aten.min.other: aten.minimum.default,
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.special_xlogy.default: aten.xlogy.Tensor,
    aten.special_xlogy.other_scalar: aten.xlogy.Scalar_Other,
    aten.special_xlogy.self_scalar: aten.xlogy.Scalar_Self,
    aten.special_softmax.default: aten.softmax.int,
    aten.special_log_softmax.default: aten.log_softmax.int,
    # these hide that they return views
    aten.unsafe_chunk.default: aten.chunk.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


def _pairs() -> dict[Any, Any]:
    found = dict(_OTHER_OVERLOADS)
    for alias, name in _SAME_OVERLOADS.items():
        plain = getattr(aten, name)
        for overload in getattr(aten, alias).overloads():
            if overload in plain.overloads() and "out" not in overload:
                found[getattr(getattr(aten, alias), overload)] = getattr(plain, overload)
    return found


for _alias, _plain in _pairs().items():
    if _plain in FUNCTIONS:
        FUNCTIONS[_alias] = FUNCTIONS[_plain]
    state(_alias, same_as=_plain, at_mean=facts(_plain).at_mean)
