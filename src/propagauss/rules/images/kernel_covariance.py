"""What posteriors say of the weight of a convolution, as a matrix `[out, P]` that meets patches of `P` entries."""

from __future__ import annotations

import glob

import torch
from torch import Tensor

from propagauss.gaussian import symmetric_root
from propagauss.posteriors.base import Posterior
from propagauss.posteriors.kronecker import Eigenfactors, KroneckerPosterior
from propagauss.posteriors.low_rank import LowRankPosterior
from propagauss.rules.images.memory import refuse
from propagauss.rules.images.patches import Layout


def eigenfactors(posterior: KroneckerPosterior, name: str, layout: Layout) -> Eigenfactors | None:
    """Kronecker factors that split the weight into outputs and patches; None if there are no such factors."""
    if layout.transposed:
        return None
    factors = posterior._factors[name]
    return None if factors.right is None else factors.map(lambda t: t.clone())


def joint(
    posterior: Posterior, weight: str, bias: str | None, layout: Layout
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Covariance of the weight `[out, P, out, P]`, of weight and bias `[out, P, out]`, of the bias `[out, out]`."""
    kept = posterior.select(*(glob.escape(n) for n in (weight, bias) if n is not None))
    size = layout.shape.numel() + (0 if bias is None else layout.out)
    dtype, device = posterior.dtype, posterior.variance(weight).device
    refuse(
        3 * size**2 * dtype.itemsize,
        f"the joint covariance of the {size} parameters of '{weight}'",
        "use a diagonal posterior, or leave this parameter out with posterior.select(...)",
        device,
    )
    dense = kept.to_dense()
    offset = 0 if bias is None or kept.names[0] == weight else layout.out
    at = layout.rows(torch.arange(layout.shape.numel(), device=device)) + offset  # [out, P]
    ww = dense[at[:, :, None, None], at]
    if bias is None:
        return ww, None, None
    biases = torch.arange(layout.out, device=device) + (layout.shape.numel() if offset == 0 else 0)
    return ww, dense[at.unsqueeze(-1), biases], dense[biases.unsqueeze(-1), biases]


def roots(ww: Tensor, wb: Tensor | None, bb: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Kernels, `P` or `P + 1` per output, and their offsets: the columns of a root of the covariance of `(W_o, b_o)`"""
    blocks = ww.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [out, P, P]
    if wb is not None and bb is not None:
        cross = wb.diagonal(dim1=0, dim2=2).mT.unsqueeze(-1)  # [out, P, 1]
        last = torch.cat([cross.mT, bb.diagonal()[:, None, None]], dim=2)
        blocks = torch.cat([torch.cat([blocks, cross], dim=2), last], dim=1)
    columns = symmetric_root(blocks.double()).mT.flatten(0, 1).to(ww.dtype)  # [out * columns, P or P + 1]
    kernels = layout.kernels(columns[:, : layout.width].contiguous())
    return kernels, None if bb is None else columns[:, -1].contiguous()


def directions(
    posterior: LowRankPosterior, weight: str, bias: str | None, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """The directions of a low-rank posterior as `roots` gives its columns."""
    rows = torch.stack([layout.rows(d) for d in posterior.directions(weight)], dim=1)  # [out, K, P]
    offsets = None if bias is None else posterior.directions(bias).mT.flatten()
    return layout.kernels(rows.flatten(0, 1).contiguous()), offsets
