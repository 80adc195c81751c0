"""Which parameters belong to the last block of a model and to what comes after it, in the order of execution."""

from __future__ import annotations

import torch
from torch import nn

from families.family import Example, call


def last_block(model: nn.Module, example: Example) -> list[str]:
    """Names of the parameters of the last block that runs, and of all modules that first run after it.

    A block is an entry of an outermost list (or, without one, sequence) of modules that holds a tenth of the parameters
    or more. A model without blocks gives the last third of its modules.
    """
    order = _order_of_calls(model, example)
    holders = [name for name in order if any(True for _ in model.get_submodule(name).parameters(recurse=False))]
    for kind in (nn.ModuleList, nn.Sequential):
        blocks = [b for c in _outermost(model, kind) for b in _entries(model, c) if b in order or _runs(b, order)]
        if blocks:
            last = max(blocks, key=lambda b: max(i for n, i in order.items() if _within(n, b)))
            start = min(i for n, i in order.items() if _within(n, last))
            after = [n for n in holders if order[n] >= start]
            return _parameters(model, [*after, last])
    return _parameters(model, holders[-max(1, len(holders) // 3) :])


def _order_of_calls(model: nn.Module, example: Example) -> dict[str, int]:
    order: dict[str, int] = {}

    def note(name: str) -> None:
        order.setdefault(name, len(order))

    hooks = [
        module.register_forward_pre_hook(lambda _module, _args, name=name: note(name))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        call(model, example)
    for hook in hooks:
        hook.remove()
    return order


def _outermost(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    total = sum(p.numel() for p in model.parameters())
    found: list[str] = []
    for name, module in model.named_modules():
        size = sum(p.numel() for p in module.parameters())
        long = isinstance(module, kind) and len(list(module.children())) > 1
        if long and 10 * size >= total and not any(_within(name, other) for other in found):
            found.append(name)
    return found


def _entries(model: nn.Module, container: str) -> list[str]:
    children = model.get_submodule(container).named_children()
    return [f"{container}.{n}" if container else n for n, m in children if any(True for _ in m.parameters())]


def _runs(block: str, order: dict[str, int]) -> bool:
    return any(_within(name, block) for name in order)


def _within(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _parameters(model: nn.Module, modules: list[str]) -> list[str]:
    kept = []
    for name, _ in model.named_parameters():
        owner = name.rpartition(".")[0]
        if owner in modules or any(_within(owner, m) for m in modules[-1:]):
            kept.append(name)
    return kept or [name for name, _ in model.named_parameters()]
