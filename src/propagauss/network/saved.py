"""A network that was read from a file: the exported program of another one, behind the same inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from propagauss.chosen import ChosenGaussian
from propagauss.errors import InputError, PropagaussError
from propagauss.gaussian import Gaussian
from propagauss.network.plan import Plan
from propagauss.network.streamlined import Slot, Streamlined
from propagauss.structures import STRUCTURES, Structure
from propagauss.tracing.trace import flatten

STORED: dict[str, Structure] = {kind.stores: kind for kind in STRUCTURES.values()}  # by the name of what they store


def tensors_of(latent: Gaussian) -> dict[str, Tensor]:
    """A latent as the named outputs of a program; `latent_of` is the way back."""
    if isinstance(latent, ChosenGaussian):
        return {"mean": latent.mean, "index": latent.index, latent.kind.stores: latent.part.stored}
    return {"mean": latent.mean, latent.kind.stores: latent.stored}


def latent_of(tensors: Mapping[str, Tensor]) -> Gaussian:
    (kind,) = (STORED[name] for name in tensors if name in STORED)
    if "index" in tensors:
        return ChosenGaussian.over(tensors["mean"], tensors["index"], kind, tensors[kind.stores])
    return Gaussian.of(kind, tensors["mean"], tensors[kind.stores])


def is_latent(names: set[str]) -> bool:
    """Whether outputs of these names are a latent."""
    return len(names & set(STORED)) == 1 and names - set(STORED) in ({"mean"}, {"mean", "index"})


class Saved(Streamlined):
    """A network from a file: `net(x)` is the `Gaussian` at the output of the model that it was made from.

    `plan` is that of the network that was saved. Inputs are what that network took; of a Gaussian input the variances.
    """

    word = "saved"

    def __init__(self, program: nn.Module, slots: list[Slot], form: Any, plan: Plan, at_once: int | None):
        nn.Module.__init__(self)
        self.body = program  # type: ignore[assignment]
        self.plan, self.slots, self.settings = plan, slots, {}
        self.noise = None  # predictors have their own
        self._in_spec = flatten(*form)[1]
        self._out_spec = pytree.tree_structure(0)
        self._single = len(slots) == 1 and self._in_spec == flatten((torch.zeros(1),), {})[1]
        self._single_output = True
        self._is_divisible = at_once is not None
        self._at_once = at_once

    def train(self, mode: bool = True) -> Saved:
        """Nothing in it depends on the mode, and an exported program refuses to be asked."""
        self.training = mode
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for slot in self.slots:
            changed = fn(torch.empty(0, dtype=slot.dtype)) if slot.dtype else None
            if changed is not None and (changed.dtype != slot.dtype or changed.device.type != "cpu"):
                raise InputError(
                    "a saved network keeps its precision and its device, which are written into its program: convert "
                    "the network before predictor.save, as in streamline(...).double()"
                )
        return super()._apply(fn, recurse)

    def _whole(self, leaves: list[Any]) -> tuple[Any, ...]:
        try:
            return (latent_of(self.body(*_flat(leaves))),)
        except (PropagaussError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if torch.compiler.is_compiling():
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise InputError(
                f"the saved network failed on these inputs ({reason}): if they are as they should be, save it again"
            ) from error

    def __repr__(self) -> str:
        return f"Saved({len(self.plan)} rewritten ops, {len(self.plan.parameters)} random parameters)"


def _flat(leaves: list[Any]) -> list[Tensor]:
    """A Gaussian as two tensors, mean and variance."""
    found: list[Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, Gaussian) and leaf.is_full:
            raise InputError(
                "a saved network takes independent inputs: give pg.Gaussian(x, variance=...) rather than a covariance"
            )
        found += [leaf.mean, leaf.variance] if isinstance(leaf, Gaussian) else [leaf]
    return found
