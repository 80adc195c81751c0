"""What comes in from outside: how a model is called, what a loader yields, which labels and targets are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from propagauss.errors import InputError
from propagauss.gaussian import Gaussian


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as `(args, kwargs)`: a dict is keyword arguments, a tuple or list is positional ones."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def arguments(*inputs: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that `inputs` stand for: a lone tuple or list is unpacked as `*x`, a lone mapping as `**x`."""
    if named or len(inputs) != 1:
        return inputs, named
    (x,) = inputs
    return as_call(dict(x) if isinstance(x, Mapping) else x)


def call(model: Any, *inputs: Any, **named: Any) -> Any:
    """`model(x)`, `model(*x)` for a tuple or list, `model(**x)` for a mapping."""
    args, kwargs = arguments(*inputs, **named)
    return model(*args, **kwargs)


def as_tensor(output: Any) -> Tensor:
    """The tensor that a model returned, or the `logits` of an output object (Hugging Face)."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        return output
    raise InputError(
        f"the model returned {_kind(output)}; a tensor is needed: wrap the model so that it returns only its logits "
        "or means"
    )


def as_latent(output: Any) -> Gaussian:
    """The Gaussian that a net returned."""
    if isinstance(output, Gaussian):
        return output
    raise InputError(
        f"the net returned {_kind(output)}; a Gaussian is needed: give pg.streamline(model, posterior, example), or "
        "a baseline such as MAP(model), rather than the model itself"
    )


def check_eval(model: nn.Module) -> None:
    """Refuse a model in training mode if that makes its output random, or depend on the rest of the batch."""
    for path, module in model.named_modules():
        if module.training and _training_matters(module):
            where = f"{type(module).__name__} at '{path or '(model)'}'"
            raise InputError(f"{where} is in training mode: call model.eval() first")


def _training_matters(module: nn.Module) -> bool:
    if isinstance(module, _NormBase):  # batch norm, and instance norm if it keeps statistics
        return isinstance(module, _BatchNorm) or module.track_running_stats
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return float(module.dropout) > 0
    return isinstance(module, nn.RReLU)


def batches(
    loader: Iterable[Any], device: torch.device | None = None, progress: str | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """The `(x, y)` pairs of a loader, `x` on `device`; `progress` is the title of a bar, shown on terminals only."""
    empty = True
    for batch in tqdm(loader, desc=progress, leave=False, disable=None if progress else True):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            raise InputError(
                f"the loader yields {_kind(batch)}; it must yield pairs (x, y) with y a tensor, and x a tensor, or a "
                "tuple or dict of inputs"
            )
        x, y = batch
        x = dict(x) if isinstance(x, Mapping) else x
        empty = empty and y.shape[:1].numel() == 0
        yield pytree.tree_map_only(Tensor, lambda t: t.to(device), x) if device is not None else x, y
    if empty:
        raise InputError("the loader is empty: it yielded no data (a generator can be read only once)")


def device_of(net: Any) -> torch.device | None:
    """Where a net, or a baseline around a model, holds its tensors; None if it holds none."""
    module = net if isinstance(net, nn.Module) else getattr(net, "model", None)
    if not isinstance(module, nn.Module):
        return None
    tensors = (t for group in (module.parameters(), module.buffers()) for t in group)
    return next((t.device for t in tensors), None)


def check_labels(labels: Tensor, shape: torch.Size, classes: int) -> Tensor:
    """Class indices in the shape of the predictions (`shape`, without the class dimension), as int64.

    One trailing dimension of size 1 is dropped; nothing is ever broadcast.
    """
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(
            f"labels are {labels.dtype}; class indices must be integers: use labels.long(), or labels.argmax(-1) if "
            "they are one-hot"
        )
    if labels.shape == (*shape, 1):
        labels = labels.squeeze(-1)
    if labels.shape != shape:
        raise InputError(f"labels have shape {tuple(labels.shape)}, but the predictions need {tuple(shape)}")
    labels = labels.long()
    if labels.numel() and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise InputError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, but there are {classes} classes: "
            f"they must lie in 0 to {classes - 1}"
        )
    return labels


def check_targets(targets: Tensor, shape: torch.Size) -> Tensor:
    """Regression targets in the shape of the predicted means; `[N]` stands for `[N, 1]` and the reverse, no other."""
    if targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(f"targets are {targets.dtype}; regression needs real numbers: use targets.float()")
    if targets.shape != shape and (targets.shape == (*shape, 1) or (*targets.shape, 1) == shape):
        targets = targets.reshape(shape)
    if targets.shape != shape:
        raise InputError(f"targets have shape {tuple(targets.shape)}, the predictions {tuple(shape)}: they must agree")
    if not targets.isfinite().all():
        raise InputError("targets have values that are not finite: remove or impute those points")
    return targets


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
