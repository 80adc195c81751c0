"""Models and how they are called, what they return, and which labels and targets fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from propagauss.alone import ALONE
from propagauss.checks import kind, tensor
from propagauss.errors import InputError, PropagaussError
from propagauss.gaussian import Gaussian


def as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as `(args, kwargs)`: a mapping is keyword arguments, a tuple or list is positional ones."""
    if isinstance(example, Mapping):  # a dict, or what a tokeniser returns
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, (tuple, list)) else ((example,), {})


def arguments(*inputs: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that `inputs` stand for: a lone tuple or list is unpacked as `*x`, a lone mapping as `**x`."""
    if named or len(inputs) != 1:
        return inputs, named
    return as_call(inputs[0])


def call(model: Any, *inputs: Any, **named: Any) -> Any:
    """`model(x)`, `model(*x)` for a tuple or list, `model(**x)` for a mapping."""
    args, kwargs = arguments(*inputs, **named)
    return model(*args, **kwargs)


def as_model(model: Any, what: str = "the model", scripted: bool = False) -> nn.Module:
    """A module whose parameters are its own: what `torch.compile` returned is opened, other wrappers are refused."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        made = ": make one, as in model = Net()" if isinstance(model, type) else ""
        if isinstance(getattr(model, "model", None), nn.Module):  # a Trainer, say
            made = ": give its .model, in evaluation mode"
        raise InputError(f"{what} must be an nn.Module, but is {kind(model)}{made}")
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise InputError(f"{what} is in {type(model).__name__}: give the model inside, model.module")
    if isinstance(model, torch.jit.ScriptModule) and not scripted:
        raise InputError(
            f"{what} is a ScriptModule ({type(model).__name__}), whose parameters cannot be exchanged: give the "
            "nn.Module that it was made from, with its weights loaded"
        )
    for path, part in model.named_modules():
        if type(part).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(f"{what} is quantised ({type(part).__name__} at '{path}'): give the one it was made from")
    with ALONE:  # another thread may have exchanged the parameters
        for name, p in model.named_parameters():
            if is_lazy(p):
                raise InputError(f"'{name}' of {what} has no shape yet: call a lazy model once before")
            tensor(p, f"'{name}' of {what}")
    return model


@contextmanager
def explained(model: Any, inputs: Any, where: str = "") -> Iterator[None]:
    """What a model of the user's raises when it is called on inputs, as an error that says on which."""
    try:
        yield
    except (PropagaussError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(f"{where}{_not_running(model, inputs, error)}") from error


def _not_running(model: Any, inputs: Any, error: Exception) -> str:
    """Why a model did not run on inputs, as far as one can tell."""
    leaves = pytree.tree_leaves(inputs)
    given = ", ".join(_described(leaf) for leaf in leaves[:4]) + (", ..." if len(leaves) > 4 else "") or "no inputs"
    reason = (str(error).strip() or "no message").splitlines()[0]
    text = f"the model does not run on {given}: {type(error).__name__}: {reason}"
    types = {p.dtype for p in model.parameters()} if isinstance(model, nn.Module) else set()
    odd = {t.dtype for t in leaves if isinstance(t, Tensor) and t.is_floating_point()} - types
    if len(types) == 1 and odd:
        text += f"; the input is {odd.pop()}, the model {types.pop()}: convert one with .to()"
    elif any(isinstance(leaf, Tensor) and not (leaf.is_floating_point() or leaf.is_complex()) for leaf in leaves):
        text += "; the input holds integers: convert it with .float() if they are features, and if they are labels, "
        text += "give (x, y) rather than (y, x)"
    return text


def _described(leaf: Any) -> str:
    return f"{kind(leaf)} ({leaf.dtype})" if isinstance(leaf, Tensor) else kind(leaf)


def as_tensor(output: Any) -> Tensor:
    """The tensor that a model returned, or the `logits` of an output object (Hugging Face)."""
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise InputError(
            f"the model returned {kind(output)}; a tensor is needed: wrap the model so that it returns only its logits "
            "or means"
        )
    if output.is_complex() or not output.is_floating_point():
        raise InputError(f"the model returned a tensor of {output.dtype}; real logits or means are needed")
    return tensor(output, "what the model returned")


def as_net(net: Any) -> Any:
    """Something that maps inputs to a Gaussian, as far as one can tell without calling it."""
    if not callable(net) or isinstance(net, type):
        raise InputError(f"the net must map inputs to a Gaussian, but is {kind(net)}: use pg.streamline")
    return net


def as_latent(output: Any) -> Gaussian:
    """The Gaussian that a net returned."""
    if isinstance(output, Gaussian):
        return output
    raise InputError(
        f"the net returned {kind(output)}; a Gaussian is needed: give pg.streamline(model, posterior, example), or "
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


def device_of(net: Any) -> torch.device | None:
    """Where a net, or a baseline around a model, holds its tensors; None if it holds none."""
    return next((t.device for t in _tensors_of(net)), None)


def dtype_of(net: Any) -> torch.dtype | None:
    """Of the real numbers that a net, or a baseline around a model, holds; None if it holds none."""
    return next((t.dtype for t in _tensors_of(net) if t.is_floating_point()), None)


def _tensors_of(net: Any) -> Iterator[Tensor]:
    module = net if isinstance(net, nn.Module) else getattr(net, "model", None)
    if isinstance(module, nn.Module):
        yield from module.parameters()
        yield from module.buffers()


def check_labels(labels: Tensor, shape: torch.Size, classes: int) -> Tensor:
    """Class indices in the shape of the predictions (`shape`, without the class dimension), as int64.

    One trailing dimension of size 1 is dropped; nothing is ever broadcast.
    """
    labels = tensor(labels, "the tensor of labels")
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


def check_some_labels(labels: Tensor, shape: torch.Size, classes: int, ignored: int) -> tuple[Tensor, Tensor]:
    """The same, and which of them count: not those that are `ignored`, for which 0 is given."""
    labels = tensor(labels, "the tensor of labels")
    if not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool):
        labels = labels.long()  # of eight bits without a sign, 156 is the same as -100
    skipped = labels == ignored
    found = check_labels(labels.masked_fill(skipped, 0), shape, classes)
    return found, ~skipped.reshape(found.shape)


def check_targets(targets: Tensor, shape: torch.Size) -> Tensor:
    """Regression targets in the shape of the predicted means; `[N]` stands for `[N, 1]` and the reverse, no other."""
    targets = tensor(targets, "the tensor of targets")
    if targets.is_complex() or targets.dtype == torch.bool:
        raise InputError(f"targets are {targets.dtype}; regression needs real numbers: use targets.float()")
    if targets.shape != shape and (targets.shape == (*shape, 1) or (*targets.shape, 1) == shape):
        targets = targets.reshape(shape)
    if targets.shape != shape:
        raise InputError(f"targets have shape {tuple(targets.shape)}, the predictions {tuple(shape)}: they must agree")
    if not targets.isfinite().all():
        raise InputError("targets have values that are not finite: remove or impute those points")
    return targets
