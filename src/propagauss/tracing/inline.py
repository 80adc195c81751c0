"""Submodules of an exported graph that only change a setting (gradients, autocast off) become part of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.node import map_arg

from propagauss.errors import InputError
from propagauss.nodes import module_path

_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline(program: ExportedProgram) -> None:
    """Replace calls of such submodules by their ops, in place; autocast that is on is refused."""
    module = program.graph_module
    graph = module.graph
    while calls := [n for n in graph.nodes if n.target in (_GRAD, _AUTOCAST)]:
        node = calls[0]
        source, inputs = _read(module, node)
        results = _copied(module, node, module.get_submodule(source.target), inputs)  # type: ignore[arg-type]
        for part in list(node.users):  # operator.getitem
            new = results[part.args[1]]
            part.replace_all_uses_with(new)
            program.graph_signature.replace_all_uses(part.name, new.name)
            graph.erase_node(part)
        graph.erase_node(node)
        if not source.users:
            graph.erase_node(source)


def _copied(module: fx.GraphModule, at: fx.Node, body: fx.GraphModule, inputs: Any) -> Any:
    """The ops of `body` on `inputs`, copied before `at`; submodules of its own move up into `module`."""
    env: dict[fx.Node, Any] = {}
    arguments = iter(inputs)
    results: Any = ()
    with module.graph.inserting_before(at):
        for part in body.graph.nodes:
            if part.op == "placeholder":
                env[part] = next(arguments)
            elif part.op == "output":
                results = map_arg(part.args[0], lambda n: env[n])
            elif part.op == "get_attr":
                name = f"{at.name}_{part.target}".replace(".", "_")
                setattr(module, name, getattr(body, str(part.target)))
                env[part] = module.graph.get_attr(name)
            else:
                env[part] = module.graph.node_copy(part, lambda n: env[n])
    return results


def _read(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Any]:
    """The submodule that a call runs, and its arguments."""
    args: Any = node.args
    if node.target is _GRAD:
        return args[1], args[2:]
    device, _, enabled, _, source, *inputs = args
    if enabled:
        raise InputError(
            f"the model switches torch.autocast on for {device} at '{_path(module, source)}', which chooses a "
            "precision for every op: leave autocast out of the model, and use it around the streamlined network instead"
        )
    return source, inputs


def _path(module: fx.GraphModule, source: fx.Node) -> str:
    """Where the first op inside belongs: the call itself does not know where it comes from."""
    body: Any = module.get_submodule(str(source.target))
    parts = [n for n in body.graph.nodes if n.op == "call_function"]
    return module_path(parts[0]) if parts else "(model)"
