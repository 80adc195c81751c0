"""Watch a forward pass and note every linear map that uses one of the chosen parameters.

A linear map `h = W a + b` (linear, addmm, matmul, convolution) needs only its input `a` and the gradient `g` at its
output `h` for everything that a Laplace fit asks: per-sample gradients `Σ_t g_t a_tᵀ` and Kronecker factors `Σ a aᵀ`,
`Σ g gᵀ`. It is noted where a torch function is called, so no hook is put on the model, and a layer counts however it is
reached: nested, shared, or written as `F.linear` in a custom `forward`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from propagauss.errors import InputError, kept_norm
from propagauss.posteriors.laplace.spots import Reading, Spot, lookup, read


@dataclass
class Layer:
    """One call of a linear map. A row is one sample at one position of a sequence or image.

    Attributes:
        weight, bias: the operands as the model passed them.
        stored: how the weight is stored, "[out, in]" or "[in, out]".
        groups: number of channel groups `G`; 1 for anything but a grouped convolution.
        input: what the layer was applied to, in the model's own layout.
        inputs: brings an input into rows, `[rows, G, in]`; takes `input` or a slice of its first dimension.
        gradients: brings a gradient at the output into rows, `[rows, G, out / G]`.
    """

    weight: Tensor
    bias: Tensor | None
    input: Tensor
    inputs: Callable[[Tensor], Tensor]
    gradients: Callable[[Tensor], Tensor]
    stored: str = "[out, in]"
    groups: int = 1

    @property
    def out(self) -> int:
        return self.weight.shape[0 if self.stored == "[out, in]" else 1]


@dataclass
class Use:
    """One use of chosen parameters in a linear map, by name; `probe` is a zero that was added to its output."""

    layer: Layer
    weight: str | None
    bias: str | None
    probe: Tensor

    @property
    def rows(self) -> int:
        return self.probe.numel() // self.layer.out


@dataclass(eq=False)
class Capture(TorchFunctionMode):
    """Context in which a model is called.

    Args:
        names: name of each chosen parameter tensor, keyed by `id`.
        size: number of samples; 0 if results that all of them share are to be left as they are.

    Attributes:
        uses: linear maps that use chosen parameters, in the order of the calls.
        spots: other ops that use them, and whose per-sample gradients are known (spots.py).
        others: chosen parameters that also take part in anything else than linear maps.
        unread: those of them for which some op is not among the spots.
        padding: tables of embeddings among them, each with a row that stands for padding.
    """

    names: Mapping[int, str]
    size: int = 0
    uses: list[Use] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    others: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    padding: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _refuse_randomness(func, kwargs)
        if func is F.multi_head_attention_forward:
            return self._look_inside(func, args, kwargs)
        self._note_lookup(func, args, kwargs)
        result = func(*args, **kwargs)
        touched = [self.names[id(t)] for t in pytree.tree_leaves((args, kwargs)) if id(t) in self.names]
        if not touched or not any(isinstance(t, Tensor) for t in pytree.tree_leaves(result)):
            return result
        reader = _READERS.get(func)
        layer = reader(*args, **kwargs) if reader else None
        if layer is None:
            self.others.update(touched)
            return self._spotted(result, touched, read(func, args, kwargs))
        weight, bias = self.names.get(id(layer.weight)), self.names.get(id(layer.bias))
        for name in (weight, bias):
            if name is not None:
                touched.remove(name)
        self.others.update(touched)  # a parameter may be the input, too
        self.unread.update(touched)
        if weight is None and bias is None:
            return result
        probe = torch.zeros_like(result, requires_grad=True)
        self.uses.append(Use(layer, weight, bias, probe))
        return result + probe

    def _note_lookup(self, func: Any, args: Any, kwargs: Any) -> None:
        found = lookup(func, args, kwargs)
        name = None if found is None else self.names.get(id(found.table))
        if found is None or name is None:
            return
        if found.keeps_norm:
            raise InputError(kept_norm(name))
        if found.padding is not None:
            self.padding.add((name, found.padding))

    def _spotted(self, result: Any, touched: list[str], readings: list[Reading]) -> Any:
        """Note what of the parameters of a call can be read, and watch its result."""
        found = [each for each in readings if id(each.parameter) in self.names]
        read_here = [self.names[id(each.parameter)] for each in found]
        if sorted(read_here) != sorted(touched) or not isinstance(result, Tensor):
            self.unread.update(touched)
            return result
        alone = self.size > 1 and result.shape[:1] == (1,) and all(each.squares for each in found)
        probe = result.new_zeros((self.size, *result.shape[1:]) if alone else result.shape, requires_grad=True)
        output = result.detach()
        self.spots += [Spot(n, r.gradient, output, probe, r.squares) for n, r in zip(read_here, found, strict=True)]
        return result + probe

    def _look_inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """PyTorch offers attention as one function; what it consists of is seen if it does not offer itself again."""
        with self:
            return _opened(func)(*args, **kwargs)


@functools.cache
def _opened(func: FunctionType) -> FunctionType:
    """A function of PyTorch in Python that does not ask whether a mode wants to have it."""
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _refuse_randomness(func: Any, kwargs: Mapping[str, Any]) -> None:
    """Dropout that a module in training mode calls as a function cannot be seen from the outside."""
    dropping = kwargs.get("training") and kwargs.get("p", 0) > 0
    if dropping or kwargs.get("dropout_p", 0) > 0:
        name = getattr(func, "__name__", str(func))
        raise InputError(f"the forward pass is random: it calls {name} in training mode; call model.eval() first")


# -- how each function is read as a linear map; None if this call is not one


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Layer | None:
    plain = weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])
    return _dense(input, weight, bias) if plain else None


def _addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Layer | None:
    plain = beta == 1 and alpha == 1 and bias.shape == mat2.shape[1:]
    return _dense(mat1, mat2, bias, "[in, out]") if plain else None


def _matmul(input: Tensor, other: Tensor) -> Layer | None:
    return _dense(input, other, None, "[in, out]") if other.dim() == 2 else None


def _dense(input: Tensor, weight: Tensor, bias: Tensor | None, stored: str = "[out, in]") -> Layer | None:
    if input.dim() < 2:  # without a batch dimension
        return None

    def rows(t: Tensor) -> Tensor:
        return t.reshape(-1, 1, t.shape[-1])

    return Layer(weight, bias, input.detach(), rows, rows, stored)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Layer | None:
    if input.dim() != weight.dim():  # without a batch dimension
        return None

    def gradients(g: Tensor) -> Tensor:  # [B, out, *places] -> [B * places, G, out / G]
        return g.flatten(2).transpose(1, 2).reshape(-1, groups, g.shape[1] // groups)

    def inputs(x: Tensor) -> Tensor:
        return patches(x, tuple(weight.shape[2:]), stride, padding, dilation, groups)

    return Layer(weight, bias, input.detach(), inputs, gradients, groups=groups)


def patches(x: Tensor, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    """The inputs that a convolution multiplies with its weight: `[B, C, *size] -> [B * places, G, C / G * kernel]`."""
    n = len(kernel)
    steps, gaps = _for_each_axis(stride, n), _for_each_axis(dilation, n)
    spans = [gap * (k - 1) for k, gap in zip(kernel, gaps, strict=True)]
    if padding == "same":
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sides = [(p, p) for p in _for_each_axis(0 if padding == "valid" else padding, n)]
    x = F.pad(x, [p for side in reversed(sides) for p in side])
    for axis in range(n):
        x = x.unfold(2 + axis, spans[axis] + 1, steps[axis])[..., :: gaps[axis]]
    places, taps = math.prod(x.shape[2 : 2 + n]), math.prod(kernel)
    x = x.reshape(x.shape[0], groups, x.shape[1] // groups, places, taps)
    return x.permute(0, 3, 1, 2, 4).reshape(-1, groups, x.shape[2] * taps)


def _for_each_axis(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


_READERS: dict[Any, Callable[..., Layer | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), _convolution),
}
