"""Out of Python: a streamlined network as a torch.export archive (`.pt2`) or an ONNX graph (`.onnx`).

Both take plain tensors and return plain tensors, with the batch left open where the network has it open, and need
neither propagauss nor the model's own code to run.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from propagauss.alone import levels_kept, quiet
from propagauss.checks import kind, new_file, written
from propagauss.checks import path as checked_path
from propagauss.errors import InputError, PropagaussError
from propagauss.gaussian import Gaussian
from propagauss.network.linearised import Linearised
from propagauss.network.saved import tensors_of
from propagauss.network.streamlined import Slot, Streamlined
from propagauss.nodes import hint, is_open, op_name, replace
from propagauss.passes.backwards.written_out import written_out
from propagauss.predictive import archive
from propagauss.tracing.exporting import no_stacks
from propagauss.tracing.own_thread import own_thread
from propagauss.version import __version__

Outputs = Callable[[Gaussian], dict[str, Tensor]]
Joined = Callable[[Any], Any]
aten = torch.ops.aten


def export(net: Any, path: str | os.PathLike[str], outputs: Outputs, details: dict[str, Any], joined: Joined) -> Path:
    """Write the network with what `outputs` makes of its latent; the ending of the path says in which form.

    `joined` makes one latent of what the network returns, see `Likelihood.joined`.
    """
    target = checked_path(path, "the path to export to")
    writers = {".pt2": _write_archive, ".onnx": _write_onnx}
    if target.suffix not in writers:
        raise InputError(f"cannot export to '{target.name}': the name must end in .pt2 or .onnx")
    if not isinstance(net, Streamlined):
        raise InputError(f"only a streamlined network can be exported, not a {type(net).__name__}: use pg.streamline")
    new_file(target, "the path to export to")
    module = Deployed(net, outputs, joined).eval()
    program = _program(module)
    details = {"propagauss": __version__, "torch": torch.__version__} | details
    with written(target), _whole(target) as temporary:
        writers[target.suffix](program, module, temporary, {k: str(v) for k, v in details.items()})
    return target


def save(
    net: Any, path: str | os.PathLike[str], own: Mapping[str, Any], details: dict[str, Any], joined: Joined
) -> Path:
    """Write the network itself, its latent as it is, with what `propagauss.load` needs to make the predictor again.

    `own` is what the predictor says of itself; see `archive.state`.
    """
    target = checked_path(path, "the path to save to")
    if target.suffix != ".pt2":
        raise InputError(f"cannot save to '{target.name}': the name must end in .pt2")
    if not isinstance(net, Streamlined):
        raise InputError(
            f"only a predictor of a streamlined or linearised network can be saved, not of {kind(net)}: use "
            "pg.streamline; with posterior None it gives the plain model"
        )
    new_file(target, "the path to save to")
    module = Deployed(net, tensors_of, joined).eval()
    program = _program(module)
    state = archive.described(net, sizes_of(program), own)
    details = {"propagauss": __version__, "torch": torch.__version__} | details | {archive.SAVED: state}
    with written(target), _whole(target) as temporary:
        _write_archive(program, module, temporary, {k: str(v) for k, v in details.items()})
    return target


def sizes_of(program: ExportedProgram) -> list[tuple[int | None, ...]]:
    """Of every tensor that a program takes; None where any size will do."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    taken = [nodes[str(name)].meta["val"].shape for name in program.graph_signature.user_inputs]
    return [tuple(None if is_open(n) else hint(n) for n in shape) for shape in taken]


class Deployed(nn.Module):
    """Tensors in, a dictionary of tensors out. A Gaussian input is two tensors: mean, and variance or covariance."""

    def __init__(self, net: Streamlined, outputs: Outputs, joined: Joined = lambda output: output):
        super().__init__()
        self.net, self.outputs, self.joined = net, outputs, joined
        self.slots = [slot for slot in net.slots if not slot.literal]

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        latent = self.joined(self.net.from_leaves(list(self._leaves(iter(tensors)))))
        if not isinstance(latent, Gaussian):
            raise InputError("only a network with one output can be written: choose one with streamline(output=...)")
        return self.outputs(latent)

    def _leaves(self, tensors: Iterator[Tensor]) -> Iterator[Any]:
        for slot in self.slots:
            yield Gaussian.diagonal(next(tensors), next(tensors)) if slot.uncertain else next(tensors)

    def example(self, batch: int) -> list[Any]:
        """Inputs of the network, for a batch of this size."""
        generator = torch.Generator().manual_seed(0)

        def tensors() -> Iterator[Tensor]:
            for slot in self.slots:
                for _ in range(1 + slot.uncertain):
                    ones = torch.ones([batch if n is None else n for n in slot.sizes], dtype=slot.dtype)
                    yield ones.uniform_(0.5, 1.5, generator=generator) if ones.is_floating_point() else ones

        return list(self._leaves(tensors()))

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        if [slot.name for slot in self.slots] == ["x0"]:
            return ["x_mean", "x_variance"] if self.slots[0].uncertain else ["x"]
        return [n for s in self.slots for n in ((f"{s.name}_mean", f"{s.name}_variance") if s.uncertain else (s.name,))]


def _program(module: Deployed) -> ExportedProgram:
    left: list[Any] = []
    if isinstance(module.net, Linearised) and all(slot.sizes.count(None) <= 1 for slot in module.slots):
        with torch.no_grad(), quiet(), no_stacks(), own_thread(module), _no_open_derivatives():
            module.net, left = written_out(module.net, module.example)
    each = [slot for slot in module.slots for _ in range(1 + slot.uncertain)]
    shapes = tuple({i: Dim.AUTO for i, n in enumerate(slot.sizes) if n is None} for slot in each)
    example = tuple(_example(slot) for slot in each)
    program = _exported(module, example, shapes, left)
    _warn_of_fixed_sizes(program, module.names, shapes)
    return program


def _exported(
    module: Deployed, example: tuple[Tensor, ...], shapes: tuple[dict[int, Any], ...], left: list[Any]
) -> ExportedProgram:
    """With open sizes if that can be, else with those of the example; `left` are ops that stand in the way."""
    for dynamic in ((shapes,), None):
        try:
            with torch.no_grad(), quiet(), no_stacks(), own_thread(module), _ScalarOps(), _no_open_derivatives():
                copies = tuple(x.clone() for x in example)  # a failed try leaves marks on them
                program = torch.export.export(module, copies, dynamic_shapes=dynamic, strict=False)
                _check_constants(program)
                _drop_idle(program)
                return program
        except PropagaussError:
            raise
        except Exception as error:
            reason = error
    if left:
        ops = ", ".join(dict.fromkeys(map(op_name, left)))
        raise InputError(
            f"the derivative of {ops} is taken automatically (net.plan says so), in a form that cannot be exported: "
            "use pg.streamline, or a posterior without the parameters before it (posterior.select)"
        ) from reason
    raise InputError(
        f"torch.export could not write the network ({type(reason).__name__}: {str(reason)[:200]}): an op that is "
        "linearised by its own Jacobian (net.plan names them) may have a derivative that cannot be exported"
    ) from reason


def _check_constants(program: ExportedProgram) -> None:
    """What a derivative left in the program as a constant has no numbers, and raises here."""
    for value in program.constants.values():
        if isinstance(value, Tensor):
            value.untyped_storage()


def _drop_idle(program: ExportedProgram) -> None:
    """Conversions that change nothing, and checks before them, which keep alive what nobody else reads."""
    _drop_checks(program, set(program.graph_signature.user_inputs))
    for node in list(program.graph.nodes):
        if node.target in (aten.to.dtype, aten.to.device, aten.to.dtype_layout) and _is_idle(node):
            replace(program, node, node.args[0])
    program.graph.eliminate_dead_code(is_impure_node=_does_something)
    program.graph_module.recompile()


def _does_something(node: fx.Node) -> bool:
    """Beside its result, or it may: where vectorisation begins and ends, nothing is returned that anybody reads."""
    return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable


def _drop_checks(program: ExportedProgram, given: Collection[Any] = ()) -> None:
    """What they compare, such as the dtype of a value, is the same in every call, unless the value is `given`."""
    for node in program.graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        if node.args[0].name not in given:
            program.graph.erase_node(node)


def _is_idle(conversion: fx.Node) -> bool:
    source: Any = conversion.args[0]
    before, after = source.meta["val"], conversion.meta["val"]
    same = (before.dtype, before.device, before.layout) == (after.dtype, after.device, after.layout)
    asks = conversion.kwargs.get("copy") or conversion.kwargs.get("memory_format") or len(conversion.args) > 3
    return same and not asks and source.op != "placeholder"


class _ScalarOps(TorchFunctionMode):
    """`x * 2` by the op for numbers: the forward derivative of the one for tensors fixes all sizes (torch 2.13)."""

    ops: ClassVar[dict[Any, Any]] = {
        aten.add.Tensor: aten.add.Scalar,
        aten.sub.Tensor: aten.sub.Scalar,
        aten.mul.Tensor: aten.mul.Scalar,
        aten.div.Tensor: aten.div.Scalar,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ops and len(args) == 2 and isinstance(args[0], Tensor) and isinstance(args[1], int | float):
            func = self.ops[func]
        return func(*args, **(kwargs or {}))


def _warn_of_fixed_sizes(program: ExportedProgram, names: list[str], shapes: tuple[dict[int, Any], ...]) -> None:
    """torch.export silently fixes a size that it cannot keep open."""
    inputs = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    fixed = [
        f"{name} is {hint(size)} along dimension {i}"
        for name, node, wanted in zip(names, inputs, shapes, strict=True)
        for i, size in enumerate(node.meta["val"].shape)
        if i in wanted and not is_open(size)
    ]
    if fixed:
        warnings.warn(f"the exported file takes no other sizes: {', '.join(fixed)}", stacklevel=5)


def _example(slot: Slot) -> Tensor:
    sizes = [max(n, 2) if fixed is None else n for n, fixed in zip(slot.example, slot.sizes, strict=True)]
    return torch.ones(sizes, dtype=slot.dtype)


def _write_archive(program: ExportedProgram, module: Deployed, path: Path, details: dict[str, str]) -> None:
    with quiet():
        archive.write(program, path, details | {"inputs": ", ".join(module.names)})


def _write_onnx(program: ExportedProgram, module: Deployed, path: Path, details: dict[str, str]) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise InputError("ONNX needs the packages onnx and onnxscript: pip install propagauss[export]") from error
    _drop_checks(program)  # the file states the types of its inputs itself; PyTorch cannot decompose them under vmap
    names = list(program.call_spec.out_spec.unflatten(range(program.call_spec.out_spec.num_leaves)))  # type: ignore[union-attr]
    try:
        with quiet(), no_stacks(), _no_open_derivatives():
            written = torch.onnx.export(
                program, input_names=module.names, output_names=names, dynamo=True, verbose=False
            )
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if "No ONNX function" in line), str(error)[:200])
        raise InputError(
            f"PyTorch's ONNX exporter could not convert the network ({reason.strip()}): export to .pt2 instead; with "
            "covariance='full' the Monte Carlo link needs a Cholesky factor, which ONNX does not have"
        ) from error
    assert written is not None
    _rename_inner(written.model.graph, {*names, *module.names})
    written.model.metadata_props.update(details)
    written.save(path, external_data=False)


def _rename_inner(graph: Any, taken: set[str]) -> None:
    """Values inside the graph that the exporter named like one of its inputs or outputs."""
    outside = {id(value) for value in (*graph.inputs, *graph.outputs)}
    for node in graph:
        for value in node.outputs:
            if value.name in taken and id(value) not in outside:
                value.name = f"inner_{value.name}"


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place in the end."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes it private
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _no_open_derivatives() -> Iterator[None]:
    """Exporters that fail within a forward derivative leave it open, and with it every later trace (torch 2.13)."""
    try:
        with levels_kept():
            yield
    except Exception:
        try:
            level = torch._C._enter_dual_level()
        except RuntimeError:  # there is only one level, and it is still open
            level = 0
        torch._C._exit_dual_level(level=level)
        raise
