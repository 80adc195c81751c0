"""While a model is traced: calls of PyTorch that would hide what happens in them are replaced by plain ops.

A mode is active in its own thread only and patches nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from propagauss.tracing.calls.attention_call import batch_first_attention
from propagauss.tracing.calls.recurrent import UNROLL

_TRANSPOSES = {torch.Tensor.transpose, torch.transpose, torch.Tensor.swapaxes, torch.swapaxes}
_PERMUTES = {torch.Tensor.permute, torch.permute}
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class PlainCalls(TorchFunctionMode):
    """Multi-head attention with the batch in front; the recurrent calls with the given numbers step by step."""

    def __init__(self, unroll: frozenset[int] = frozenset()):
        super().__init__()
        self.unroll = unroll
        self.recurrent_calls = 0
        self.transposed: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (the transpose, held alive; what it is one of)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            result = batch_first_attention({i: source for i, (_, source) in self.transposed.items()}, *args, **kwargs)
            return func(*args, **kwargs) if result is None else result
        if func in UNROLL:
            number, self.recurrent_calls = self.recurrent_calls, self.recurrent_calls + 1
            result = UNROLL[func](*args, **kwargs) if number in self.unroll else None
            return func(*args, **kwargs) if result is None else result
        if func is torch._C._set_grad_enabled and args == (torch.is_grad_enabled(),):
            return None  # nothing changes, but torch.export would cut the graph in two here, and join it again
        if func == _DATA:
            return args[0].detach()  # the attribute itself cannot be traced
        result = func(*args, **kwargs)
        if _swaps_first_two(func, args, kwargs):
            self.transposed[id(result)] = (result, args[0])
        return result


def _swaps_first_two(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call exchanges samples and positions of `[B, T, E]`."""
    if kwargs or not args or not isinstance(args[0], Tensor) or args[0].dim() != 3:
        return False
    if func in _TRANSPOSES:
        return {d % 3 for d in args[1:]} == {0, 1}
    if func in _PERMUTES:
        order = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
        return [d % 3 for d in order] == [1, 0, 2]
    return False
