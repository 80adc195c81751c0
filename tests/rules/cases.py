"""The table of cases: one line per rule gives it the whole contract of `test_contract.py`."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)  # equal if the same, so that networks can be kept by case
class Case:
    """A deterministic function of independent Gaussian inputs.

    Args:
        function: of tensors `[B, *event]`.
        events: event shape of each input.
        exact: the rule gives exact first two moments at any variance; otherwise it is right to first order.
        second_order: extra covariance beyond linearisation, from (means, covariances), for exact products.
        positive: keep the means away from zero and negative values.
        structures: the covariance structures that the rule supports.
        options: further arguments of `streamline`.
        held: for a rule that holds something fixed at the mean (attention weights, statistics of a row): from the means
            of one sample, the function that it propagates instead.
    """

    name: str
    function: Callable[..., Tensor]
    events: tuple[tuple[int, ...], ...] = ((4,),)
    exact: bool = False
    second_order: Callable[[list[Tensor], list[Tensor]], Tensor] | None = None
    positive: bool = False
    structures: tuple[str, ...] = ("diagonal", "full")
    rtol: float = 1e-9
    options: dict[str, str] = field(default_factory=dict)
    held: Callable[[list[Tensor]], Callable[..., Tensor]] | None = None

    def __str__(self) -> str:
        return self.name


class Call(nn.Module):
    """A function as a module, so that it can be exported."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


def _product(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    return covariances[0] * covariances[1]


def _matmul(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """Cov of `Σ_k a_ik b_kj` beyond first order, literally."""
    (batch, i, k), j = means[0].shape, means[1].shape[2]
    a = covariances[0].reshape(batch, i, k, i, k)
    b = covariances[1].reshape(batch, k, j, k, j)
    result = torch.zeros(batch, i, j, i, j, dtype=torch.float64)
    for p in range(k):
        for q in range(k):
            result += a[:, :, p, :, q][:, :, None, :, None] * b[:, p, :, q, :][:, None, :, None, :]
    return result.reshape(batch, i * j, i * j)


def _gated(means: list[Tensor], covariances: list[Tensor]) -> Tensor:
    """Of `a σ(b)` with independent halves and a linearised gate: `Var(a) σ'(b)² Var(b)`."""
    first, second = covariances[0].diagonal(dim1=1, dim2=2).chunk(2, -1)
    gate = torch.sigmoid(means[0].chunk(2, -1)[1])
    return torch.diag_embed(first * second * (gate * (1 - gate)).square())


W = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
ROW = torch.linspace(0.5, 2, 4, dtype=torch.float64)
MASK = torch.tensor([True, False, True, False])
PAIR = ((4,), (4,))

ELEMENTWISE = [
    Case("relu", F.relu),
    Case("relu6", F.relu6),
    Case("leaky_relu", lambda x: F.leaky_relu(x, 0.2)),
    Case("rrelu", lambda x: F.rrelu(x, training=False)),
    Case("elu", lambda x: F.elu(x, 0.7)),
    Case("selu", F.selu),
    Case("celu", lambda x: F.celu(x, 1.3), rtol=1e-7),  # as below, of one divided by 1.3
    Case("gelu", F.gelu),
    Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    Case("silu", F.silu),
    Case("mish", F.mish),
    Case("sigmoid", torch.sigmoid),
    Case("tanh", torch.tanh),
    Case("logsigmoid", F.logsigmoid),
    Case("softplus", lambda x: F.softplus(x, beta=2.0)),
    Case("softsign", F.softsign),
    Case("softshrink", lambda x: F.softshrink(x, 0.1)),
    Case("hardshrink", lambda x: F.hardshrink(x, 0.1)),
    Case("tanhshrink", F.tanhshrink),
    Case("hardtanh", lambda x: F.hardtanh(x, -1.5, 0.9)),
    Case("hardsigmoid", F.hardsigmoid, rtol=1e-7),  # PyTorch's own derivative is 1/6 in single precision
    Case("hardswish", F.hardswish),
    Case("threshold", lambda x: F.threshold(x, 0.1, 20.0)),
    Case("exp", torch.exp),
    Case("log", torch.log, positive=True),
    Case("log1p", torch.log1p, positive=True),
    Case("expm1", torch.expm1),
    Case("sin", torch.sin),
    Case("cos", torch.cos),
    Case("sqrt", torch.sqrt, positive=True),
    Case("rsqrt", torch.rsqrt, positive=True),
    Case("reciprocal", torch.reciprocal, positive=True),
    Case("abs", torch.abs),
    Case("square", torch.square),
    Case("pow", lambda x: x**3),
    Case("erf", torch.erf),
    Case("ndtr", torch.special.ndtr),
    Case("atan", torch.atan),
    Case("clamp", lambda x: x.clamp(-1.1, 0.9)),
    Case("scalar base", lambda x: 2.0**x),
    Case("prelu", lambda x: F.prelu(x, ROW), ((4, 2),)),
]

FUSED = [
    Case("swish in pieces", lambda x: x * torch.sigmoid(x)),
    Case("gelu in pieces", lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x**3)))),
    Case("sum with itself", lambda x: x + x, exact=True),
    Case("elementwise residual", lambda x: x + torch.tanh(x)),
    Case("with a constant", lambda x: x * torch.tanh(x * ROW) + ROW),
]

ARITHMETIC = [
    Case("add", torch.add, PAIR, exact=True),
    Case("add alpha", lambda x, y: torch.add(x, y, alpha=2.5), PAIR, exact=True),
    Case("add constant", lambda x: x + ROW, exact=True),
    Case("add broadcast", torch.add, ((1, 4), (3, 1)), exact=True),
    Case("sub", torch.sub, PAIR, exact=True),
    Case("sub from constant", lambda x: 1 - x, exact=True),
    Case("neg", operator.neg, exact=True),
    Case("mul", torch.mul, PAIR, exact=True, second_order=_product),
    Case("mul constant", lambda x: x * ROW, exact=True),
    Case("mul scalar", lambda x: x * -1.5, exact=True),
    Case("div constant", lambda x: x / ROW, exact=True),
    Case("div", torch.div, PAIR, positive=True),
    Case("divide constant", lambda x: ROW / x, positive=True),
    Case("maximum", torch.maximum, PAIR),
    Case("atan2", torch.atan2, PAIR, positive=True),
    Case("where", lambda x, y: torch.where(MASK, x, y), PAIR, exact=True),
    Case("where constant", lambda x: torch.where(MASK, x, 1.0), exact=True),
    Case("glu", F.glu, structures=("full",)),
    Case("glu of the first", lambda x: F.glu(x, dim=1), ((4, 2),), structures=("full",)),
    Case("glu of independent halves", F.glu, second_order=_gated, structures=("diagonal",)),
    Case("in-place", lambda x: (x + 0).add_(1).mul_(2), exact=True),
    Case("write to a column", lambda x: _write(x, 0), exact=True),
    Case("write to the last column", lambda x: _write(x, -1), exact=True),
    Case("write to a range", lambda x: _write(x, slice(1, 3)), exact=True),
]


def _write(x: Tensor, where: int | slice) -> Tensor:
    y = x * 2
    y[:, where] *= 3
    return y


LINEAR = [
    Case("matmul constant", lambda x: x @ W, exact=True),
    Case("matmul sequence", lambda x: x @ W, ((2, 4),), exact=True),
    Case("constant matmul", lambda x: W.t() @ x, ((4, 2),), exact=True),
    Case("mm", lambda x: torch.mm(x, W), exact=True),
    Case("addmm", lambda x: torch.addmm(ROW[:3], x, W), exact=True),
    Case("addmm scaled", lambda x: torch.addmm(ROW[:3], x, W, beta=2, alpha=0.5), exact=True),
    Case("bmm", torch.bmm, ((2, 3), (3, 2)), exact=True, second_order=_matmul),
    Case("bmm constant", lambda x: torch.bmm(x, W.expand(x.shape[0], 4, 3)), ((2, 4),), exact=True),
    Case("linear", lambda x: F.linear(x, W.t()), exact=True),
    Case("linear sequence", lambda x: F.linear(x, W.t(), ROW[:3]), ((2, 4),), exact=True),
    Case("einsum", lambda x: torch.einsum("btd,dk->btk", x, W), ((2, 4),), exact=True),
]

SHAPE = [
    Case("view", lambda x: x.view(x.shape[0], 2, 3), ((6,),), exact=True),
    Case("reshape to merged batch", lambda x: x.reshape(-1, 2), ((3, 2),), exact=True, structures=("diagonal",)),
    Case("merged batch on the way", lambda x: (x.reshape(-1, 2) * 2).reshape(-1, 6), ((3, 2),), exact=True),
    Case("flatten", lambda x: x.flatten(1), ((2, 3),), exact=True),
    Case("unflatten", lambda x: x.unflatten(1, (2, 2)), exact=True),
    Case("permute", lambda x: x.permute(0, 2, 1), ((2, 3),), exact=True),
    Case("transpose", lambda x: x.transpose(-1, -2), ((2, 3),), exact=True),
    Case("movedim", lambda x: x.movedim(1, -1), ((2, 3),), exact=True),
    Case("unsqueeze", lambda x: x.unsqueeze(1), exact=True),
    Case("squeeze", lambda x: x.squeeze(2), ((3, 1),), exact=True),
    Case("slice", lambda x: x[:, 1:3], exact=True),
    Case("strided slice", lambda x: x[:, ::2], exact=True),
    Case("select", lambda x: x[:, 1], ((3, 2),), exact=True),
    Case("index", lambda x: x[:, torch.tensor([2, 0, 0])], exact=True),
    Case("index_select", lambda x: x.index_select(1, torch.tensor([3, 1])), exact=True),
    Case("gather", lambda x: x.gather(1, torch.tensor([[3, 1]]).expand(x.shape[0], 2)), exact=True),
    Case("expand", lambda x: x.unsqueeze(1).expand(-1, 2, -1), exact=True),
    Case("repeat", lambda x: x.repeat(1, 2), exact=True),
    Case("repeat_interleave", lambda x: x.repeat_interleave(2, dim=1), exact=True),
    Case("flip", lambda x: x.flip(1), exact=True),
    Case("roll", lambda x: x.roll(1, 1), exact=True),
    Case("tril", torch.tril, ((2, 2),), exact=True),
    Case("contiguous", lambda x: x.transpose(1, 2).contiguous(), ((2, 3),), exact=True),
    Case("clone", torch.clone, exact=True),
    Case("dropout in evaluation", lambda x: F.dropout(x, 0.5, training=False), exact=True),
    Case("pad", lambda x: F.pad(x, (1, 2), value=3.0), exact=True),
    Case("circular pad", lambda x: F.pad(x, (1, 1), mode="circular"), ((2, 3),), exact=True),
    Case("masked_fill", lambda x: x.masked_fill(MASK, -5.0), exact=True),
    Case("cast", lambda x: x.to(torch.float64), exact=True),
    Case("split", lambda x: x.split([1, 3], dim=1)[1], exact=True),
    Case("chunk", lambda x: x.chunk(2, dim=1)[0], exact=True),
    Case("unbind", lambda x: x.unbind(1)[1], ((3, 2),), exact=True),
    Case("split and swap", lambda x: torch.cat(x.split(2, dim=1)[::-1], dim=1), exact=True),
    Case("cat", lambda x, y: torch.cat([x, y], 1), ((2,), (3,)), exact=True),
    Case("cat constant", lambda x: torch.cat([x, ROW.expand(x.shape[0], 4)], 1), exact=True),
    Case("stack", lambda x, y: torch.stack([x, y], 1), PAIR, exact=True),
    Case("sum", lambda x: x.sum(1), ((3, 2),), exact=True),
    Case("sum keepdim", lambda x: x.sum((1, 2), keepdim=True), ((3, 2),), exact=True),
    Case("mean", lambda x: x.mean(-1), ((3, 2),), exact=True),
    Case("mean keepdim", lambda x: x.mean([1], keepdim=True), ((3, 2),), exact=True),
    Case("cumsum", lambda x: x.cumsum(1), exact=True),
    Case("max", lambda x: x.max(dim=1).values),
    Case("amax", lambda x: x.amax(1, keepdim=True)),
    Case("amin over two", lambda x: x.amin((1, 2)), ((2, 2),)),
]

NORMALISATION = [
    Case("softmax", lambda x: x.softmax(-1)),
    Case("softmax over middle", lambda x: x.softmax(1), ((3, 2),)),
    Case("softmin", lambda x: F.softmin(x, dim=-1)),
    Case("log_softmax", lambda x: x.log_softmax(-1)),
    Case("logsumexp", lambda x: x.logsumexp(-1)),
    Case("batch_norm", lambda x: F.batch_norm(x, ROW - 1, ROW, weight=ROW, bias=-ROW), exact=True),
    Case("batch_norm of sequences", lambda x: F.batch_norm(x, ROW - 1, ROW), ((4, 2),), exact=True),
]

from rules.cases_ops import OPS  # noqa: E402 (it needs Case)
from rules.cases_transformer import TRANSFORMER  # noqa: E402 (it needs Case)
from rules.cases_vision import VISION  # noqa: E402 (it needs Case)

CASES = [*ELEMENTWISE, *FUSED, *ARITHMETIC, *LINEAR, *SHAPE, *NORMALISATION, *OPS, *VISION, *TRANSFORMER]
