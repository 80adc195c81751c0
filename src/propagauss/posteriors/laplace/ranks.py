"""The processes of torch.distributed that share a fit, each with a part of the data of its own."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from propagauss.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, or this process alone if there is none; then nothing is exchanged."""

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not in the process group that distributed= names")

    @classmethod
    def of(cls, distributed: bool | ProcessGroup) -> Ranks:
        """For `True` those of the default group."""
        if distributed is False:
            return cls()
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "distributed=True needs a process group: start the script with torchrun and call "
                "torch.distributed.init_process_group() before the fit (or pass distributed=False)"
            )
        return cls(dist.group.WORLD if distributed is True else distributed)

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in their order."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def add(self, *tensors: Tensor) -> None:
        """Sums over the ranks, in place."""
        if self.group is not None:
            for t in tensors:
                dist.all_reduce(t, group=self.group)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails on one rank fails on all, so that none waits for it for ever."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        reports = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report is not None:
                raise InputError(f"the fit failed on rank {rank} of {self.size}: {report}")

    def require_same(self, values: Mapping[str, Any], remedy: str) -> None:
        """Raise on all ranks unless all have the same values, which are named by their keys."""
        everyone = self.gather(dict(values))
        for key in dict.fromkeys(k for each in everyone for k in each):
            found = [each.get(key) for each in everyone]
            other = next((rank for rank, value in enumerate(found) if value != found[0]), None)
            if other is not None:
                raise InputError(f"{key} is {found[0]!r} on rank 0 and {found[other]!r} on rank {other}: {remedy}")


def fingerprint(model: nn.Module) -> dict[str, str]:
    """A checksum of every parameter and buffer, by name."""
    tensors = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    return {f"the checksum of {kind} '{name}'": _checksum(t) for kind, named in tensors.items() for name, t in named}


def _checksum(t: Tensor) -> str:
    content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode() + content.numpy().tobytes()).hexdigest()[:16]


def check_parts(model: nn.Module, loader: Any, ranks: Ranks) -> None:
    """What would go wrong without a word: a model that waits for other ranks, data that are missing or count twice."""
    if ranks.group is not None and isinstance(model, DistributedDataParallel):
        raise InputError(
            "a model in DistributedDataParallel waits for the other ranks at every batch, and they may have fewer: "
            "give fit_laplace the model inside, model.module"
        )
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    if ranks.group is None:
        warnings.warn(
            "the loader has a DistributedSampler, so this fit sees one part of the data: pass distributed=True to fit "
            "to the parts of all ranks",
            stacklevel=3,
        )
    elif sampler.total_size != len(sampler.dataset):  # pyright: ignore[reportArgumentType]
        change = "drops some" if sampler.drop_last else "repeats some, which would count twice"
        warnings.warn(
            f"DistributedSampler makes {sampler.total_size} points of {len(sampler.dataset)} so that all parts are "  # pyright: ignore[reportArgumentType]
            f"even, so it {change}: use torch.utils.data.Subset(data, range(rank, len(data), world_size)) instead",
            stacklevel=3,
        )
