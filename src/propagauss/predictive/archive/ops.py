"""Functions that a program may call: ops of PyTorch on tensors, arithmetic of sizes, and forward derivatives."""

from __future__ import annotations

import re
from typing import Any

from propagauss.predictive.archive.refused import Refused

ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z0-9_]{1,100})\.([A-Za-z0-9_]{1,100})")
OPERATORS = {
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge"),
    *("and_", "or_", "getitem"),
}
SIZES = {
    *(f"_operator.{name}" for name in OPERATORS),
    *(f"torch.sym_{name}" for name in ("int", "float", "max", "min", "ite", "not")),
    *("torch._sym_sqrt", "math.ceil", "math.floor", "math.trunc"),
}
DERIVATIVES = {
    f"torch._functorch.predispatch.{name}"
    for name in (
        *("_enter_dual_level", "_exit_dual_level", "_make_dual", "_unpack_dual", "_unwrap_for_grad"),
        *("_jvp_increment_nesting", "_jvp_decrement_nesting", "_vmap_increment_nesting", "_vmap_decrement_nesting"),
        *("_add_batch_dim", "_remove_batch_dim", "lazy_load_decompositions"),
    )
}
FILES = {"filename"}  # arguments of `from_file` and `save`
# ops that believe the indices or strides they are given, and read or write outside of a tensor if these are wrong
UNCHECKED = re.compile(r".*(_reshape_alias|sparse|nested|max_pool\dd\w*_backward|segment_reduce|convert_indices).*")


def check_op(target: Any) -> None:
    """`torch.os.system` would be looked up like an op, and called."""
    if target in SIZES or target in DERIVATIVES:
        return
    found = ATEN.fullmatch(target) if isinstance(target, str) else None
    if not found or not _on_tensors(*found.groups()):
        raise Refused(f"its program calls {str(target)[:100]!r}, which is not an op of PyTorch on tensors")


def _on_tensors(name: str, overload: str) -> bool:
    """Registered with PyTorch's dispatcher (ops of TorchScript only are not), not for files, and within its tensors."""
    import torch

    if UNCHECKED.fullmatch(name):
        return False
    try:
        op = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        return False
    if not isinstance(op, torch._ops.OpOverload) or FILES & {argument.name for argument in op._schema.arguments}:
        return False
    return torch._C._dispatch_has_kernel(op.name()) and op._schema.name == f"aten::{name}"
