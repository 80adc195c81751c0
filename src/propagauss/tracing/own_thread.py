"""A trace that other threads do not get into, and that does not get into theirs.

`torch.export` exchanges the parameters of the model while it traces, and replaces `nn.Module.__call__` and
`__getattr__` for the whole process (2.13): a module that another thread calls meanwhile would be written into the
graph, or compute with parameters that have no values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx.experimental import proxy_tensor
from tqdm import TMonitor

from propagauss.alone import ALONE

WAIT = 60.0  # seconds: a model that calls its own parts in threads of its own must not wait for ever
SETTLE = 0.01  # seconds, in which threads that are about to read a parameter get to it


@contextmanager
def own_thread(model: nn.Module) -> Iterator[None]:
    """Only this thread is traced. Others that call a part of `model` wait until it is done; ask for `ALONE` before."""
    if not _others():
        yield
        return
    tracer: Any = proxy_tensor._ModuleStackTracer
    owner, parts = threading.get_ident(), {id(m) for m in model.modules()}
    call, trace_call, trace_getattr = nn.Module.__call__, tracer.call_module, tracer.getattr

    def wait_for(module: Any) -> None:
        if id(module) in parts and ALONE.acquire(timeout=WAIT):
            ALONE.release()

    def waiting_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            wait_for(self)
        return call(self, *args, **kwargs)

    def own_call(self: Any, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == owner:
            return trace_call(self, module, forward, args, kwargs)
        wait_for(module)
        return forward(*args, **kwargs)

    def own_getattr(self: Any, attr: str, value: Any, cache: Any) -> Any:
        return trace_getattr(self, attr, value, cache) if threading.get_ident() == owner else value

    nn.Module.__call__ = waiting_call  # type: ignore[method-assign]
    tracer.call_module, tracer.getattr = own_call, own_getattr
    try:
        time.sleep(SETTLE)
        yield
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
        tracer.call_module, tracer.getattr = trace_call, trace_getattr


def _others() -> bool:
    """Whether any thread could call a module; the monitor of progress bars, which torch starts, never does."""
    own = threading.current_thread()
    return any(t is not own and not isinstance(t, TMonitor) for t in threading.enumerate())
