"""Ops that are not elementwise: reductions, shapes, indexing, pooling, complex values, linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from referee.case import Case, case, linear, section

INDEX = torch.tensor([2, 0, 3])
BOOL = torch.tensor([True, False, True, True])


def _of(name: str, f: Callable[[Tensor], Any], **settings: Any) -> Case:
    """A function of a random value: `[B, 4]`, or as `shape` says."""
    shape = settings.pop("shape", (4,))
    size = torch.Size(shape).numel()
    return case(name, lambda m, x: f(m.l(x).view(-1, *shape)), l=linear(5, size), **settings)


REDUCTIONS = section(
    "Reductions and sorting",
    _of("sum", lambda h: h.sum(-1)),
    _of("mean", lambda h: h.mean(-1, keepdim=True)),
    _of("mean of all but the batch", lambda h: h.mean((1, 2)), shape=(2, 3)),
    _of("cumsum", lambda h: h.cumsum(-1)),
    _of("cumprod", lambda h: h.cumprod(-1)),
    _of("prod", lambda h: h.prod(-1)),
    _of("var", lambda h: h.var(-1)),
    _of("std", lambda h: h.std(-1, keepdim=True)),
    _of("var_mean", lambda h: torch.var_mean(h, -1)),
    _of("std_mean", lambda h: torch.std_mean(h, -1)),
    _of("norm", lambda h: h.norm(dim=-1)),
    _of("1-norm", lambda h: torch.linalg.vector_norm(h, 1, dim=-1)),
    _of("norm, order 3", lambda h: h.norm(p=3, dim=-1)),
    _of("max over a dimension", lambda h: h.max(-1).values),
    _of("min over a dimension", lambda h: h.min(-1).values),
    _of("amax", lambda h: h.amax(-1)),
    _of("amin", lambda h: h.amin(-1, keepdim=True)),
    _of("logsumexp", lambda h: h.logsumexp(-1)),
    _of("softmax", lambda h: h.softmax(-1)),
    _of("log softmax", lambda h: h.log_softmax(-1)),
    _of("softmin", lambda h: F.softmin(h, -1)),
    _of("logcumsumexp", lambda h: h.logcumsumexp(-1)),
    _of("cummax", lambda h: h.cummax(-1).values),
    _of("sort", lambda h: h.sort(-1).values),
    _of("topk", lambda h: h.topk(2, -1).values),
    _of("median", lambda h: h.median(-1).values),
    _of("kthvalue", lambda h: h.kthvalue(2, -1).values),
    _of("quantile", lambda h: h.quantile(0.3, -1)),
    _of("argmax one-hot", lambda h: h * F.one_hot(h.argmax(-1), 4)),
    _of("gather by argsort", lambda h: h.gather(-1, h.argsort(-1))),
    _of("diff", lambda h: h.diff(dim=-1)),
    _of("trapezoid", lambda h: torch.trapezoid(h, dim=-1)),
    _of("entropy", lambda h: -(h.softmax(-1) * h.log_softmax(-1)).sum(-1)),
    _of("dist to a constant", lambda h: (h - 1).square().sum(-1).sqrt()),
    _of("renorm in pieces", lambda h: h / h.abs().sum(-1, keepdim=True)),
    _of("mse between halves", lambda h: (h[:, :2] - h[:, 2:]).square().mean(-1)),
    _of("cross entropy, by sample", lambda h: F.cross_entropy(h, h.argmax(-1) * 0 + 1, reduction="none")),
    _of("huber, by sample", lambda h: F.huber_loss(h, torch.zeros_like(h), reduction="none")),
)

MOVES = section(
    "Shape, indexing and scattering",
    _of("view", lambda h: h.view(-1, 2, 2)),
    _of("reshape_as", lambda h: h.reshape_as(h.new_zeros(h.shape[0], 2, 2))),
    _of("view_as another random value", lambda h: h.flatten(1).view_as(h), shape=(2, 3)),
    _of("expand_as another random value", lambda h: h[:, :1].expand_as(h) * h),
    _of("type_as another random value", lambda h: torch.ones_like(h).type_as(h) * h),
    _of("transpose", lambda h: h.transpose(1, 2), shape=(2, 3)),
    _of("permute", lambda h: h.permute(0, 2, 1), shape=(2, 3)),
    _of("flip", lambda h: h.flip(-1)),
    _of("rot90", lambda h: h.rot90(1, (1, 2)), shape=(2, 3)),
    _of("roll", lambda h: h.roll(1, -1)),
    _of("shift by slices", lambda h: h - torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)),
    _of("expand", lambda h: h[:, None].expand(-1, 2, -1)),
    _of("repeat", lambda h: h.repeat(1, 2)),
    _of("repeat_interleave", lambda h: h.repeat_interleave(2, -1)),
    _of("tile", lambda h: h.tile((2,))),
    _of("pad", lambda h: F.pad(h, (1, 2), value=3.0)),
    _of("circular padding", lambda h: F.pad(h, (1, 1), mode="circular"), shape=(2, 3)),
    _of("reflected padding", lambda h: F.pad(h, (1, 1), mode="reflect"), shape=(2, 3)),
    _of("cat", lambda h: torch.cat([h, 2 * h], -1)),
    _of("concatenate", lambda h: torch.concatenate([h, h.tanh()], -1)),
    _of("stack", lambda h: torch.stack([h, h.square()], -1)),
    _of("hstack", lambda h: torch.hstack([h, h])),
    _of("chunk and multiply", lambda h: (lambda a, b: a * b)(*h.chunk(2, -1))),
    _of("split", lambda h: h.split([1, 3], -1)[1].exp()),
    _of("unbind", lambda h: torch.stack(h.unbind(1)[::-1], 1), shape=(2, 3)),
    _of("unfold", lambda h: h.unfold(-1, 2, 1)),
    _of("diagonal", lambda h: h.diagonal(dim1=1, dim2=2), shape=(3, 3)),
    _of("diag_embed", lambda h: h.diag_embed()),
    _of("tril", lambda h: h.tril(), shape=(3, 3)),
    _of("index by integers", lambda h: h[:, INDEX]),
    _of("index_select", lambda h: h.index_select(-1, INDEX)),
    _of("index by a mask", lambda h: h[:, BOOL]),
    case("index by a mask in a buffer", lambda m, x: m.l(x)[:, m.mask], l=linear(), mask=BOOL),
    _of("masked_select in pieces", lambda h: torch.where(BOOL, h, 0.0).sum(-1)),
    _of("gather", lambda h: h.gather(-1, INDEX.expand(h.shape[0], -1))),
    _of("take_along_dim", lambda h: torch.take_along_dim(h, INDEX.expand(h.shape[0], -1), -1)),
    _of("x[:, 0] = ...", lambda h: _assigned(h)),
    _of("x[:, 1:3] += ...", lambda h: _added(h)),
    _of("index_put", lambda h: h.index_put((torch.arange(3)[:, None], INDEX), torch.zeros_like(h[:, :3]))),
    _of("scatter of a number", lambda h: h.scatter(-1, INDEX[:1].expand(h.shape[0], -1), 2.0)),
    _of(
        "scatter of a value",
        lambda h: torch.zeros(h.shape[0], 6).to(h).scatter(-1, INDEX.expand(h.shape[0], -1), h[:, :3]),
    ),
    _of("scatter_add", lambda h: h.scatter_add(-1, (INDEX % 2).expand(h.shape[0], -1), h[:, :3].tanh())),
    _of(
        "scatter_reduce, mean",
        lambda h: torch.zeros_like(h).scatter_reduce(-1, (INDEX % 2).expand(h.shape[0], -1), h[:, :3], "mean"),
    ),
    _of(
        "scatter_reduce, prod",
        lambda h: torch.ones_like(h).scatter_reduce(-1, (INDEX % 2).expand(h.shape[0], -1), h[:, :3], "prod"),
    ),
    _of("index_add", lambda h: torch.zeros(h.shape[0], 3).to(h).index_add(-1, torch.tensor([0, 2, 0, 1]), h)),
    _of("index_copy", lambda h: h.index_copy(-1, INDEX[:2], h[:, 2:].exp())),
    _of("index_fill", lambda h: h.index_fill(-1, INDEX[:2], 1.0)),
    _of("masked_fill by a constant mask", lambda h: h.masked_fill(BOOL, 1.5)),
    _of("masked_fill of a tensor", lambda h: h.masked_fill(BOOL, torch.tensor(1.5))),
    _of("masked_scatter in pieces", lambda h: torch.where(BOOL, h, h.flip(-1))),
    _of("zeros_like", lambda h: h + torch.zeros_like(h)),
    _of("a constant matrix of its type", lambda h: h @ h.new_full((4, 4), -1.0).tril()),
    _of("empty_like, then every other column", lambda h: _every_other(h)),
    _of("slices up to the end and beyond", lambda h: torch.stack([h[:, i:].sum(1) for i in (0, 3, 4, 9)], 1)),
    _of("narrow of nothing", lambda h: h + h.narrow(1, 4, 0).sum(1, keepdim=True)),
    _of("writes to slices of nothing", lambda h: _nothing_written(h)),
    _of("write to a part of unbind", lambda h: _unbound(h)),
    _of(
        "full_like, new_ones, empty_like",
        lambda h: h * torch.full_like(h, 2) + h.new_ones(4) + 0 * torch.empty_like(h).fill_(1.0),
    ),
    _of("meshgrid sums", lambda h: h[:, :, None] + h[:, None, :]),
    _of("outer product", lambda h: torch.einsum("bi,bj->bij", h, h)),
    _of("kron with a constant", lambda h: torch.stack([torch.kron(r, torch.ones(2).to(r)) for r in h.unbind(0)])),
    _of(
        "graph network: mean of neighbours",
        lambda h: h + torch.zeros_like(h).index_add(1, torch.tensor([0, 1, 2]), h[:, INDEX]),
        shape=(4, 2),
    ),
)


def _every_other(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    out[:, ::2], out[:, 1::2] = h[:, 2:] * 2, h[:, :2].tanh()
    return out


def _nothing_written(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 2:1].add_(1.0)
    h[:, 3:1] = 0.0
    h[:, 9:].mul_(2.0)
    return h


def _unbound(h: Tensor) -> Tensor:
    if torch.is_grad_enabled():  # autograd refuses it; the same without
        return torch.cat([h[:, :1] + h[:, 1:2], h[:, 1:]], 1)
    h = h.clone()
    first, second, *_ = h.unbind(1)
    first.add_(second)
    return h


def _assigned(h: Tensor) -> Tensor:
    y = h.clone()
    y[:, 0] = 3.0
    return y * h


def _added(h: Tensor) -> Tensor:
    y = h.clone()
    y[:, 1:3] += h[:, :2].tanh()
    return y


def _image(name: str, f: Callable[[Tensor], Any], *shape: int) -> Case:
    return _of(name, f, shape=shape)


POOLING = section(
    "Pooling and resampling",
    _image("avg_pool1d", lambda h: F.avg_pool1d(h, 2), 2, 4),
    _image("avg_pool2d, padded", lambda h: F.avg_pool2d(h, 2, 1, 1, count_include_pad=False), 1, 3, 3),
    _image("avg_pool3d", lambda h: F.avg_pool3d(h, 2), 1, 2, 2, 2),
    _image("adaptive_avg_pool2d", lambda h: F.adaptive_avg_pool2d(h, 2), 1, 3, 3),
    _image("adaptive_avg_pool1d", lambda h: F.adaptive_avg_pool1d(h, 2), 2, 3),
    _image("max_pool1d", lambda h: F.max_pool1d(h, 2), 2, 4),
    _image("max_pool2d", lambda h: F.max_pool2d(h, 2, 1), 1, 3, 3),
    _image("adaptive_max_pool2d", lambda h: F.adaptive_max_pool2d(h, 2), 1, 3, 3),
    _image("max_unpool2d", lambda h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2), 1, 4, 2),
    _image("lp_pool2d", lambda h: F.lp_pool2d(h.exp(), 2, 2), 1, 2, 4),
    _image("fractional: unfold and mean", lambda h: F.unfold(h, 2).mean(1), 1, 3, 3),
    _image("fold", lambda h: F.fold(h, (3, 3), 2), 4, 4),
    _image("interpolate, nearest", lambda h: F.interpolate(h, scale_factor=2), 1, 2, 2),
    _image("interpolate, bilinear", lambda h: F.interpolate(h, size=3, mode="bilinear"), 1, 2, 2),
    _image("interpolate, bicubic", lambda h: F.interpolate(h, size=3, mode="bicubic"), 1, 2, 2),
    _image("pixel_shuffle", lambda h: F.pixel_shuffle(h, 2), 4, 1, 2),
    _image("grid_sample of a random image", lambda h: F.grid_sample(h, _grid(h), align_corners=False), 1, 3, 3),
    _image(
        "grid_sample at a random place",
        lambda h: F.grid_sample(_grid(h).movedim(-1, 1), h.tanh(), align_corners=False),
        2,
        2,
        2,
    ),
    _image("channel attention", lambda h: h * torch.sigmoid(h.mean((2, 3), keepdim=True)), 2, 2, 2),
)


def _grid(h: Tensor) -> Tensor:
    return torch.tensor([[[0.11, -0.4], [0.33, 0.7]], [[-0.62, 0.2], [-0.15, 0.05]]], dtype=h.dtype).expand(
        h.shape[0], 2, 2, 2
    )


def _spd(h: Tensor) -> Tensor:
    """A symmetric, well-conditioned matrix."""
    return h @ h.mT + 3 * torch.eye(3, dtype=h.dtype)


def _regular(h: Tensor) -> Tensor:
    return 0.3 * h + 2 * torch.eye(3, dtype=h.dtype)


LINALG = section(
    "Products and linear algebra",
    case("bmm of two values", lambda m, x: torch.bmm(m.l(x), m.k(x).mT), l=linear(5, 2), k=linear(5, 2), x=(2, 5)),
    case("matmul of two values", lambda m, x: m.l(x) @ m.k(x).mT, l=linear(5, 2), k=linear(5, 2), x=(2, 5)),
    case(
        "einsum of two values",
        lambda m, x: torch.einsum("bti,bsi->bts", m.l(x), m.k(x)),
        l=linear(5, 2),
        k=linear(5, 2),
        x=(2, 5),
    ),
    case("dot of two values", lambda m, x: (m.l(x) * m.k(x)).sum(-1), l=linear(), k=linear()),
    case("linalg.vecdot", lambda m, x: torch.linalg.vecdot(m.l(x), m.k(x)), l=linear(), k=linear()),
    case("cross product", lambda m, x: torch.linalg.cross(m.l(x), m.k(x)), l=linear(5, 3), k=linear(5, 3)),
    case(
        "value times a constant matrix",
        lambda m, x: m.l(x) @ m.c,
        l=linear(),
        c=torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),
    ),
    _of("gram matrix", lambda h: h @ h.mT, shape=(2, 3)),
    _of("gram matrix by einsum", lambda h: torch.einsum("bij,bkj->bik", h, h), shape=(2, 3)),
    _of("inv", lambda h: torch.linalg.inv(_regular(h)), shape=(3, 3)),
    _of("det", lambda h: torch.linalg.det(_regular(h)), shape=(3, 3)),
    _of("logdet", lambda h: torch.logdet(_spd(h)), shape=(3, 3)),
    _of("slogdet", lambda h: torch.linalg.slogdet(_regular(h)).logabsdet, shape=(3, 3)),
    _of("solve", lambda h: torch.linalg.solve(_regular(h), h[:, :, 0]), shape=(3, 3)),
    _of("triangular solve", lambda h: torch.linalg.solve_triangular(_regular(h).tril(), h, upper=False), shape=(3, 3)),
    _of("qr, upper part", lambda h: torch.linalg.qr(_regular(h)).R.abs(), shape=(3, 3)),
    _of("svdvals", lambda h: torch.linalg.svdvals(_regular(h)), shape=(3, 3)),
    _of("eigvalsh", lambda h: torch.linalg.eigvalsh(_spd(h)), shape=(3, 3)),
    _of("matrix_exp", lambda h: torch.linalg.matrix_exp(0.3 * h), shape=(3, 3)),
    _of("matrix_power", lambda h: torch.linalg.matrix_power(h, 3), shape=(3, 3)),
    _of("pinv", lambda h: torch.linalg.pinv(_regular(h)), shape=(3, 3)),
    _of("trace", lambda h: torch.einsum("bii->b", h), shape=(3, 3)),
    _of("cdist of a value to itself, shifted", lambda h: torch.cdist(h, h + 1), shape=(2, 3)),
    case(
        "linalg of a parameter",
        lambda m, x: torch.linalg.solve(m.w + 3 * torch.eye(5, dtype=x.dtype), x.unsqueeze(-1)),
        w=(5, 5),
    ),
)

COMPLEX = section(
    "Complex values",
    _of("fft, real part", lambda h: torch.fft.fft(h).real),
    _of("fft, absolute value", lambda h: torch.fft.fft(h).abs()),
    _of("fft, angle", lambda h: torch.fft.fft(h).angle()[:, 1:2]),
    _of("FNet mixing", lambda h: torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real, shape=(2, 3)),
    _of("rfft and back", lambda h: torch.fft.irfft(torch.fft.rfft(h) * torch.tensor([1.0, 0.5j, 0.2]), n=4)),
    _of("fft2, power", lambda h: torch.fft.fft2(h).abs().square(), shape=(2, 3)),
    _of(
        "view_as_complex and back",
        lambda h: torch.view_as_real(torch.view_as_complex(h) * torch.tensor(0.6 + 0.8j)),
        shape=(3, 2),
    ),
    _of(
        "rotary embedding, complex",
        lambda h: torch.view_as_real(
            torch.view_as_complex(h) * torch.polar(torch.ones(3).to(h), torch.arange(3.0).to(h))
        ).flatten(1),
        shape=(3, 2),
    ),
    _of("complex exponential", lambda h: torch.exp(1j * h).real + torch.exp(1j * h).imag),
    _of("torch.complex, product", lambda h: (torch.complex(h, h.tanh()) * torch.complex(h.cos(), h)).real),
    _of("polar", lambda h: torch.polar(h.square(), h).imag),
    case(
        "Fourier operator",
        lambda m, x: torch.fft.irfft(torch.fft.rfft(m.l(x)) * torch.complex(m.r, m.i), n=4),
        l=linear(),
        r=(3,),
        i=(3,),
    ),
    case(
        "complex state-space kernel",
        lambda m, x: torch.exp(torch.complex(m.a, m.b) * torch.arange(5, dtype=x.dtype)[:, None]).sum(-1).real * x,
        a=(2,),
        b=(2,),
    ),
)

OPS = [*REDUCTIONS, *MOVES, *POOLING, *LINALG, *COMPLEX]
