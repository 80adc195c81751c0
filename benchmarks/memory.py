"""Peak memory of one call: the most bytes that tensors made in the call hold at once, as PyTorch's allocator counts.

The profiler reports every allocation and release; their running sum is exact and repeatable, and knows nothing of the
memory that imports, weights and other methods hold, so no process of its own is needed. It does not see what libraries
below PyTorch allocate for themselves (packing buffers of matrix products), nor the constants that a method keeps;
`benchmarks.footprint` does, in a process for each method.
"""

from __future__ import annotations

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise writes to the terminal at start and stop

from itertools import accumulate
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Subject


def peak_bytes(subject: Subject) -> int:
    """Peak of one call, its result included; the subject should be warm."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        output = subject.once()
    del output
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes), default=0)


def tensor_bytes(holder: Any) -> int:
    """Bytes of the parameters and buffers of a module, each storage counted once; 0 for what is no module."""
    if not isinstance(holder, nn.Module):
        return 0
    tensors = [*holder.parameters(), *holder.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
