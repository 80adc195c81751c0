"""The processes of torch.distributed that share a fit, each with a part of the data of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from propagauss.errors import InputError, PropagaussError
from propagauss.posteriors.fingerprint import checksum

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class Ranks:
    """The ranks of a process group, or this process alone if there is none; then nothing is exchanged.

    As a context, which every rank leaves when it is done or has failed: the others then notice at once.
    """

    def __init__(self, group: ProcessGroup | None = None):
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._own: ProcessGroup | None = None  # connections of this fit alone, so that they can be closed

    @classmethod
    def of(cls, distributed: bool | ProcessGroup) -> Ranks:
        """For `True` those of the default group."""
        if distributed is False:
            return cls()
        if dist.is_available() and distributed == dist.GroupMember.NON_GROUP_MEMBER:
            raise InputError("this process is not in the process group that distributed= names")
        if distributed is not True and not (dist.is_available() and isinstance(distributed, dist.ProcessGroup)):
            raise InputError(
                f"distributed is {distributed!r}; it must be True, False or a process group of torch.distributed"
            )
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "distributed=True needs a process group: start the script with torchrun and call "
                "torch.distributed.init_process_group() before the fit (or pass distributed=False)"
            )
        return cls(dist.group.WORLD if distributed is True else distributed)

    def __enter__(self) -> Ranks:
        # PyTorch makes a group only if all ranks of the default one call for it, and only gloo groups cost nothing
        if self.group is not None and self.group is dist.group.WORLD and dist.get_backend(self.group) == "gloo":
            with self._in_touch():
                new: Any = dist.new_group(timeout=_timeout(self.group))
            self._own = self.group = new
        return self

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            own, self._own, self.group = self._own, None, None
            dist.destroy_process_group(own)

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        """What PyTorch says when another rank is gone or silent, as an error of ours."""
        try:
            yield
        except RuntimeError as error:  # all errors of torch.distributed are
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PropagaussError(
                f"rank {self.rank} of {self.size} lost touch with the others in a distributed fit ({reason}): one of "
                "them has ended, has lost its network, or took longer than the timeout= of init_process_group; look "
                "at what it printed, and start the fit again on all ranks (nothing of this one was kept)"
            ) from error

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in their order."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        with self._in_touch():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def add(self, *tensors: Tensor) -> None:
        """Sums over the ranks, in place."""
        if self.group is not None:
            with self._in_touch():
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
        try:
            reports = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        except PropagaussError as lost:
            raise (error or lost) from None
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


def _timeout(group: ProcessGroup) -> timedelta | None:
    """How long the ranks of a gloo group wait for each other; None is PyTorch's default."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


def fingerprint(model: nn.Module) -> dict[str, str]:
    """A checksum of every parameter and buffer, by name."""
    tensors = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    return {f"the checksum of {kind} '{name}'": checksum(t) for kind, named in tensors.items() for name, t in named}


def check_parts(loader: Any, ranks: Ranks) -> None:
    """What would go wrong without a word: data that are missing or count twice."""
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
