"""How far a streamlined network is from the exact first-order answer `J Σ Jᵀ`, and which parameters lose their part.

`linearise` gives the exact variances. For the table, both engines see one random parameter at a time: its standard
deviation in the network over its exact one says what arrives at the output.
"""

from __future__ import annotations

import glob
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from propagauss.checks import flag, kind, whole
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian, mean_of
from propagauss.inputs import as_model
from propagauss.network.linearised import Linearised
from propagauss.network.streamlined import Streamlined, rows_of
from propagauss.passes.backwards.choice import checked
from propagauss.posteriors import Posterior
from propagauss.posteriors.base import as_posterior
from propagauss.tasks.fidelity_report import BETWEEN, INPUTS, Fidelity, Part, Table, rank_correlation
from propagauss.tracing.once import traced_once

SAME = 0.01  # how far the network made again may be from the one given, beside its own tolerance


@torch.no_grad()
def fidelity(
    net: Streamlined,
    model: nn.Module,
    posterior: Posterior | None,
    inputs: Any,
    *,
    by_parameter: bool = True,
    outputs: int | Sequence[int] | None = None,
    batch_size: int = 64,
    progress: bool = True,
) -> Fidelity:
    """Compare the standard deviations of a streamlined network with the exact first-order ones on some inputs.

    *Exact* is `pg.linearise`, which is right where the posterior is narrow enough for a first-order answer. For a wide
    one, ask `pg.tasks.linearity.against_samples` as well.

    Args:
        net: from `pg.streamline` (or `pg.linearise`, which is exact).
        model: the one that it was made from, unchanged since.
        posterior: the one that it was made with, at the same scale.
        inputs: as the network takes them: a tensor, a tuple or a dict, with Gaussians where inputs are uncertain. A few
            dozen of the kind that it will see.
        by_parameter: whether to make the table, for which a network of either engine is made for every parameter of the
            posterior, from one trace of the model.
        outputs: for models with many: compare so many of the largest ones, or these, as `pg.linearise` takes it.
        batch_size: how many inputs go through together.
        progress: whether to show a bar, on terminals only.

    Returns:
        The comparison; `print` shows it, and says what to do.
    """
    if not isinstance(net, Streamlined):
        remedy = "pass its .net" if hasattr(net, "net") else "make it with pg.streamline(model, posterior, example)"
        raise InputError(f"the network is {kind(net)}; fidelity needs what pg.streamline returns: {remedy}")
    model, by_parameter, outputs = as_model(model), flag(by_parameter, "by_parameter"), checked(outputs)
    posterior = None if posterior is None else as_posterior(posterior)
    batch_size = whole(batch_size, "batch_size", 1)
    given = replace(_read(net, inputs, batch_size), outputs=outputs)
    _check_outputs(net, given)
    steps = 2 + (len(posterior.names) if by_parameter and posterior is not None else 0)
    bar = tqdm(total=steps, desc="fidelity", disable=None if progress else True, leave=False)
    with bar, traced_once():
        exact = _exact(net, model, posterior, given)
        which, entries = _uncertain_output(exact, given)
        true = _variances(exact, given, which)
        bar.update()
        found = _variances(net, given, which)
        _check_origin(net, exact, model, posterior, given, which)
        bar.update()
        rows = _rows(net, model, posterior, given, which, true.mean, bar) if by_parameter else ()
    ranks = rank_correlation(found.sd, true.sd)
    ratio = math.sqrt(found.mean / true.mean)
    return Fidelity(ratio, ranks, Table(tuple(rows)), found.sd, true.sd, entries, isinstance(net, Linearised))


# -- inputs


@dataclass(frozen=True)
class _Given:
    """The inputs in parts, each in the form that the model takes, and an example to trace it with."""

    batches: list[Any]
    example: Any
    outputs: int | Sequence[int] | None = None  # which are compared; None for all

    def certain(self) -> _Given:
        """The same with every Gaussian replaced by its mean."""
        batches = [_mapped(mean_of, b) for b in self.batches]
        return replace(self, batches=batches, example=_mapped(mean_of, self.example))

    def variance(self, g: Gaussian) -> Tensor:
        """Of the outputs that are compared: `[B, entries]`."""
        found = g.variance.double()
        if self.outputs is not None:
            if isinstance(self.outputs, int):
                index = g.mean.topk(min(self.outputs, g.mean.shape[-1]), -1).indices
            else:
                index = torch.tensor(self.outputs, device=g.device).expand(*g.mean.shape[:-1], -1)
            found = found.gather(-1, index)
        return found.reshape(len(g.mean), -1)


def _read(net: Streamlined, inputs: Any, size: int) -> _Given:
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    leaves = net.leaves(inputs)
    counts = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves}
    if not counts or 0 in counts:
        raise InputError("fidelity needs at least one input: a batch, with samples in the first dimension")
    is_open = all(slot.literal or slot.sizes[0] is None for slot in net.slots)
    if not is_open or len(counts) > 1:
        return _Given([inputs], inputs)
    batches = [_cut(inputs, slice(start, start + size)) for start in range(0, counts.pop(), size)]
    # two inputs are enough to trace a model; low-rank variances are chosen on more
    return _Given(batches, batches[0] if net.settings.get("variance_tolerance") else _cut(inputs, slice(0, 2)))


def _cut(inputs: Any, which: slice) -> Any:
    return _mapped(lambda leaf: rows_of(leaf, which), inputs)


def _mapped(function: Any, inputs: Any) -> Any:
    """A function of every tensor and Gaussian; the form and all else stay."""

    def apply(leaf: Any) -> Any:
        return function(leaf) if isinstance(leaf, (Tensor, Gaussian)) else leaf

    return pytree.tree_map(apply, inputs, is_leaf=lambda leaf: isinstance(leaf, Gaussian))


# -- networks


def _exact(net: Streamlined, model: nn.Module, posterior: Posterior | None, given: _Given) -> Linearised:
    """The exact answer for what `net` returns, for the outputs that are compared."""
    settings = net.settings if isinstance(net, Linearised) else {"output": net.settings["output"]}
    chosen = {} if given.outputs is None else {"outputs": given.outputs}
    return linearise(model, posterior, given.example, **{**settings, **chosen, "covariance": "diagonal"})


def _remade(net: Streamlined, model: nn.Module, posterior: Posterior | None, given: _Given) -> Streamlined:
    """What the same engine makes with the same options."""
    engine = linearise if isinstance(net, Linearised) else streamline
    return engine(model, posterior, given.example, **net.settings)


def _check_origin(
    net: Streamlined,
    exact: Linearised,
    model: nn.Module,
    posterior: Posterior | None,
    given: _Given,
    which: int,
) -> None:
    """Refuse a network that was made from another model or posterior; any difference would count as an error of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they came when the network was made
        again = exact if isinstance(net, Linearised) else _remade(net, model, posterior, given)
    first = replace(given, batches=given.batches[:1])
    ours, theirs = (_variances(n, first, which) for n in (net, again))
    precision = torch.finfo(net.outputs(net.leaves(given.batches[0]))[which].dtype).eps
    allowed = SAME + 3 * net.settings.get("variance_tolerance", 0.0) + 10 * precision
    if (ours.sd - theirs.sd).abs().mean() > allowed * theirs.sd.mean():
        ratio = float(ours.sd.mean() / theirs.sd.mean()) if theirs.mean > 0 else math.inf
        raise InputError(
            f"the network was not made from this model and posterior: its standard deviations are {ratio:.3g} times "
            f"those of the same network made again from them. Pass those it was made from (posterior.scale() and "
            "training change them), or make it again first"
        )


# -- what is compared


@dataclass(frozen=True)
class _Variances:
    mean: float  # over inputs and outputs
    sd: Tensor  # [N], standard deviations averaged over outputs


def _variances(net: Streamlined, given: _Given, which: int) -> _Variances:
    total, entries, sds = 0.0, 0, []
    for batch in given.batches:
        leaves = net.leaves(batch)
        g = net.outputs(leaves)[which]
        variance = given.variance(g)
        if not bool(variance.isfinite().all()):
            raise InputError(
                f"the {net.word} network has variances that are not finite on these inputs: look for inputs that are "
                "not finite, and make the posterior narrower with posterior.scale()"
            )
        total, entries = total + float(variance.sum()), entries + variance.numel()
        sds.append(variance.sqrt().mean(1).cpu())
    return _Variances(total / entries, torch.cat(sds))


def _check_outputs(net: Streamlined, given: _Given) -> None:
    leaves = net.leaves(given.batches[0])
    for g in filter(_is_uncertain, net.outputs(leaves)):
        if g.mean.dim() == 0 or g.mean.shape[0] != leaves[0].shape[0]:
            raise InputError(
                f"the output has shape {tuple(g.shape)} for inputs of shape {tuple(leaves[0].shape)}: fidelity needs "
                "samples in the first dimension of both"
            )


def _is_uncertain(output: Any) -> bool:
    return isinstance(output, Gaussian) and bool((output.variance != 0).any())


def _uncertain_output(exact: Linearised, given: _Given) -> tuple[int, int]:
    """Which output of the model is meant, the only one with any variance, and its entries for an input."""
    results = exact.outputs(exact.leaves(given.batches[0]))
    found = [i for i, g in enumerate(results) if _is_uncertain(g)]
    if not found:
        raise InputError(
            "no variance reaches the output, so there is nothing to compare: the posterior has none, or the model does "
            "not use its parameters"
        )
    shapes = [tuple(results[i].shape) for i in found]
    if len(found) > 1:
        raise InputError(
            f"the model returns {len(found)} uncertain outputs, of shapes {', '.join(map(str, shapes))}: streamline it "
            "with output= and the name of one of them, or wrap it in a module that returns one"
        )
    return found[0], given.variance(results[found[0]]).shape[1]


def _rows(
    net: Streamlined,
    model: nn.Module,
    posterior: Posterior | None,
    given: _Given,
    which: int,
    true: float,
    bar: Any,
) -> list[Part]:
    """A row for each parameter, all else fixed at its mean; then for the inputs, and for what is left."""
    rows, certain = [], given.certain()
    for name in () if posterior is None else posterior.names:
        alone = None if posterior is None else posterior.select(glob.escape(name))
        rows.append(_row(name, net, model, alone, certain, which, true))
        bar.update()
    if any(slot.uncertain for slot in net.slots):
        rows.append(_row(INPUTS, net, model, None, given, which, true))
    if posterior is not None and type(posterior).between is not Posterior.between:
        rows.append(Part(BETWEEN, 1 - sum(row.share for row in rows), math.nan))
    return rows


def _row(
    name: str,
    net: Streamlined,
    model: nn.Module,
    posterior: Posterior | None,
    given: _Given,
    which: int,
    true: float,
) -> Part:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parameters without effect: the table says so
        exact, ours = (make(net, model, posterior, given) for make in (_exact, _remade))
    alone = _variances(exact, given, which).mean
    arrives = math.sqrt(_variances(ours, given, which).mean / alone) if alone > 0 else math.nan
    return Part(name, alone / true, arrives)
