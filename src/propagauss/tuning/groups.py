"""Which parameters of a model may be random together: its last layer, its last block, all of them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

LAST_LAYER, LAST_BLOCK, ALL = "last layer", "last block", "all parameters"
Groups = dict[str, tuple[str, ...]]


def groups(model: nn.Module, heads: int = 1) -> Groups:
    """Names of parameters, as in `model.named_parameters()`; frozen ones are left out, and so are groups that repeat.

    The last layer is the last module with a weight matrix; in a model of several `heads`, each with an output of its
    own, as many of them, if their weights have one shape. The last block begins at the last part of the longest row of
    parts (`nn.Sequential`, `nn.ModuleList`), such as the last block of a transformer, and goes to the end of the model.
    Where that is the last layer itself, as in an MLP, it is the last two layers.
    """
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    names = tuple(parameters)
    layers = list(dict.fromkeys(_owner(n) for n, p in parameters.items() if p.dim() > 1))
    if not layers:
        return {ALL: names} if names else {}
    ends = _heads(parameters, layers, heads)
    last = tuple(n for n in names if _owner(n) in ends)
    block = _block(model, names)
    if len(block) <= len(last) and len(layers) > len(ends):
        first = next(i for i, n in enumerate(names) if _owner(n) == layers[-len(ends) - 1])
        block = names[first:]
    found = {LAST_LAYER: last}
    found |= {LAST_BLOCK: block} if len(last) < len(block) < len(names) else {}
    return found | ({ALL: names} if len(names) > len(last) else {})


def _heads(parameters: Mapping[str, Tensor], layers: list[str], count: int) -> list[str]:
    ends = layers[-count:]
    shapes = {p.shape for n, p in parameters.items() if _owner(n) in ends and p.dim() > 1}
    return ends if len(shapes) == 1 else layers[-1:]


def _block(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """From the first parameter of the last part of the longest row of parts to the end; nothing if there is no row."""
    longest: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            parts = [f"{path}.{name}".lstrip(".") + "." for name, _ in module.named_children()]
            parts = [part for part in parts if any(n.startswith(part) for n in names)]
            longest = parts if len(parts) > len(longest) else longest
    if len(longest) < 2:
        return ()
    start = next(i for i, n in enumerate(names) if n.startswith(longest[-1]))
    return names[start:]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]
