"""Attention as models write it, against the paper's sums: `Var(y)` through values, mixing and output projection.

Queries and keys are fixed at their means; tokens and heads are independent. `attention="covariance"` keeps the
covariance of the values within a head up to the output projection, `"variance"` drops it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import propagauss as pg
from posteriors.cases import make_posterior
from reference import linear_layer, random_psd

BATCH, TOKENS, WIDTH, HEADS = 2, 3, 4, 2
Fused = Callable[[Tensor, Tensor, Tensor], Tensor]

# -- the same attention, written in different ways


class Parts(NamedTuple):
    """Weights `[out, in]` and biases of the four projections, or the variances of their entries."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    output: tuple[Tensor, Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in Hugging Face."""
    scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
    weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v)


def divided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in many tutorials."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(2)  # forbids nothing
    return scores.masked_fill(mask == 0, float("-inf")).softmax(-1) @ v


class Separate(nn.Module):
    """Four layers, as in ViT and BERT; with fewer heads for keys and values, as in Llama, if asked to."""

    causal = False

    def __init__(self, attend: Fused = fused, heads: int = HEADS, groups: int | None = None, width: int = WIDTH):
        super().__init__()
        self.attend, self.heads, self.groups, self.size = attend, heads, groups or heads, width // heads
        self.query = nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, self.groups * self.size) for _ in range(2))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.size)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        y = self.attend(q, k, v)
        return self.output(y.transpose(1, 2).reshape(*x.shape[:-1], -1).contiguous())

    @staticmethod
    def parts(named: dict[str, Tensor]) -> Parts:
        return Parts(*((named[f"{n}.weight"], named[f"{n}.bias"]) for n in Parts._fields))


class Conv1D(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.weight.size(-1))


class GPT2(nn.Module):
    """One Conv1D for queries, keys and values, then a split."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (t.view(*t.shape[:-1], HEADS, -1).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().reshape(*x.shape[:-1], -1).contiguous())

    @staticmethod
    def parts(named: dict[str, Tensor]) -> Parts:
        rows = zip(named["c_attn.weight"].t().chunk(3), named["c_attn.bias"].chunk(3), strict=True)
        return Parts(*rows, (named["c_proj.weight"].t(), named["c_proj.bias"]))


class Timm(nn.Module):
    """One linear layer, then reshape, permute and unbind."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v, dropout_p=0.0).transpose(1, 2).reshape(b, n, c))

    @staticmethod
    def parts(named: dict[str, Tensor]) -> Parts:
        rows = zip(named["qkv.weight"].chunk(3), named["qkv.bias"].chunk(3), strict=True)
        return Parts(*rows, (named["proj.weight"], named["proj.bias"]))


class MultiHead(nn.Module):
    """`nn.MultiheadAttention` on one sequence."""

    causal = False

    def __init__(self, need_weights: bool, batch_first: bool = True):
        super().__init__()
        self.need_weights, self.batch_first = need_weights, batch_first
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
        nn.init.normal_(self.layer.in_proj_bias)
        nn.init.normal_(self.layer.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.layer(x, x, x, need_weights=self.need_weights)[0]
        return y if self.batch_first else y.transpose(0, 1)

    @staticmethod
    def parts(named: dict[str, Tensor]) -> Parts:
        rows = zip(named["layer.in_proj_weight"].chunk(3), named["layer.in_proj_bias"].chunk(3), strict=True)
        return Parts(*rows, (named["layer.out_proj.weight"], named["layer.out_proj.bias"]))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Llama's `repeat_kv`."""

    def repeat(x: Tensor) -> Tensor:
        b, groups, t, d = x.shape
        times = q.shape[1] // groups
        return x[:, :, None].expand(b, groups, times, t, d).reshape(b, groups * times, t, d)

    return F.scaled_dot_product_attention(q, repeat(k), repeat(v))


STYLES: dict[str, Callable[[], Any]] = {
    "separate": Separate,
    "eager": lambda: Separate(eager),
    "divided": lambda: Separate(divided),
    "GPT-2": GPT2,
    "timm": Timm,
    "MultiheadAttention": lambda: MultiHead(need_weights=False),
    "MultiheadAttention, weights": lambda: MultiHead(need_weights=True),
    "MultiheadAttention, positions first": lambda: MultiHead(need_weights=False, batch_first=False),
    "grouped": lambda: Separate(grouped, groups=1),
    "grouped by repetition": lambda: Separate(repeated, groups=1),
}
SUBSETS = {
    "fixed": (),
    "value": ("value",),
    "output": ("output",),
    "queries and keys": ("query", "key"),
    "all": Parts._fields,
}
COMBINATIONS = [
    (style, subset)
    for style in STYLES
    for subset in SUBSETS
    if subset in ("fixed", "all") or style in ("separate", "GPT-2", "timm")
]


def make(style: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return STYLES[style]().double().eval()


def named(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in module.named_parameters()}


def make_input(uncertain: bool) -> pg.Gaussian | Tensor:
    generator = torch.Generator().manual_seed(4)
    m = torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    v = torch.rand(m.shape, dtype=torch.float64, generator=generator) + 0.1
    return pg.Gaussian(m, v) if uncertain else m


def make_variances(module: Any, subset: tuple[str, ...]) -> dict[str, Tensor]:
    """Variances of all parameters, zero outside the subset (the rows of a fused layer may differ)."""
    generator = torch.Generator().manual_seed(5)
    variances = {n: torch.rand(p.shape, dtype=p.dtype, generator=generator) + 0.1 for n, p in named(module).items()}
    for part, tensors in zip(Parts._fields, module.parts(variances), strict=True):
        if part not in subset:
            for t in tensors:
                t.zero_()  # a view
    return variances


# -- the sums of the paper's appendix


def attention_weights(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """`q, k: [T, d]`"""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    for t in range(len(q)):
        for s in range(len(k)):
            if causal and s > t:
                scores[t, s] = -math.inf
    return scores.softmax(-1)


def literal(module: Any, joints: tuple[Tensor, Tensor], m: Tensor, v: Tensor, keep: bool) -> Tensor:
    """Variances of the output for one sequence, `m, v: [T, D]`.

    `joints` are the dense covariances of (weight, bias) of the value and output projections. For every token
    `Cov(v_t) = W_V diag(var h_t) W_Vᵀ + noise`; of it the block of each head is kept, or (`keep` False) its diagonal. A
    head mixes the tokens by `P²`; the output projection sees independent heads.
    """
    parts = module.parts(named(module))
    q, k, value = (m @ w.mT + b for w, b in parts[:3])
    size = WIDTH // HEADS
    values = [linear_layer(parts.value[0], joints[0], m[t], v[t].diag(), True) for t in range(len(m))]
    result = []
    for t in range(len(m)):
        mean, blocks = [], []
        for head in range(HEADS):
            group = slice(head * size, (head + 1) * size) if len(value[0]) == WIDTH else slice(0, size)
            p = attention_weights(q[:, head * size : (head + 1) * size], k[:, group], module.causal)
            covariance = sum(p[t, s] ** 2 * values[s][group, group] for s in range(len(m)))
            blocks.append(covariance if keep else covariance.diagonal().diag())
            mean.append(sum(p[t, s] * value[s, group] for s in range(len(m))))
        result.append(linear_layer(parts.output[0], joints[1], torch.cat(mean), torch.block_diag(*blocks), True))
    return torch.stack([c.diagonal() for c in result])


def diagonal_joint(pair: tuple[Tensor, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in pair]).diag()


def expected(module: Any, variances: dict[str, Tensor], x: pg.Gaussian | Tensor, keep: bool) -> Tensor:
    m, v = (x, torch.zeros_like(x)) if isinstance(x, Tensor) else (x.mean, x.variance)
    parts = module.parts(variances)
    joints = diagonal_joint(parts.value), diagonal_joint(parts.output)
    return torch.stack([literal(module, joints, m[b], v[b], keep) for b in range(BATCH)])


def means(x: pg.Gaussian | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else x.mean


once_made, one_input = cache(make), cache(make_input)


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("attention", ["variance", "covariance"])
@pytest.mark.parametrize("style, subset", COMBINATIONS)
def test_equals_the_sums_of_the_paper(style: str, subset: str, attention: str) -> None:
    module, x = once_made(style), one_input(uncertain=True)
    variances = make_variances(module, SUBSETS[subset])
    net = pg.streamline(module, pg.DiagonalPosterior(variances), x, attention=attention)
    g = net(x)
    torch.testing.assert_close(g.mean, module(means(x)).detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(g.variance, expected(module, variances, x, attention == "covariance"))
    assert "queries and keys" in str(net.plan) and "mean" in str(net.plan)


@pytest.mark.parametrize("style", ["separate", "GPT-2", "grouped"])
def test_covariance_matters(style: str) -> None:
    """Else the tests above would not tell the two apart."""
    module, x = make(style), make_input(uncertain=True)
    variances = make_variances(module, ())
    with_it, without = (expected(module, variances, x, keep) for keep in (True, False))
    assert ((with_it / without).log().abs() > 0.1).any()


@pytest.mark.parametrize("style", ["separate", "GPT-2", "MultiheadAttention", "grouped"])
def test_without_value_covariance_both_agree(style: str) -> None:
    """A fixed input leaves the values of independent weights uncorrelated."""
    module, x = make(style), make_input(uncertain=False)
    posterior = pg.DiagonalPosterior(make_variances(module, ("value", "output")))
    nets = [pg.streamline(module, posterior, x, attention=a) for a in ("variance", "covariance")]
    torch.testing.assert_close(nets[0](x).variance, nets[1](x).variance, rtol=1e-12, atol=0)


def test_orthogonal_values_agree() -> None:
    """Values that are entries of the input, each its own: their covariance is diagonal though the input is random."""
    module, x = make("separate"), make_input(uncertain=True)
    nn.init.eye_(module.value.weight)
    nets = [pg.streamline(module, None, x, attention=a) for a in ("variance", "covariance")]
    torch.testing.assert_close(nets[0](x).variance, nets[1](x).variance, rtol=1e-12, atol=0)


@pytest.mark.parametrize("uncertain", [False, True], ids=["fixed input", "gaussian input"])
@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_any_posterior_of_value_and_output(kind: str, uncertain: bool) -> None:
    module, x = make("separate"), make_input(uncertain)
    random = {n: p for n, p in named(module).items() if n.startswith(("value", "output"))}
    posterior, dense = make_posterior(kind, random, scale=0.5)
    half = len(dense) // 2
    joints = dense[:half, :half], dense[half:, half:]
    m, v = means(x), torch.zeros_like(x) if isinstance(x, Tensor) else x.variance
    truth = torch.stack([literal(module, joints, m[b], v[b], keep=False) for b in range(BATCH)])
    torch.testing.assert_close(pg.streamline(module, posterior, x)(x).variance, truth)


# -- one attention, several ways to write it


@pytest.mark.parametrize("attention", ["variance", "covariance"])
@pytest.mark.parametrize("style, kind", [("eager", "kronecker"), ("divided", "diagonal")])
def test_eager_attention_is_the_fused_op(style: str, kind: str, attention: str) -> None:
    x = make_input(uncertain=True)
    posterior, _ = make_posterior(kind, named(make("separate")), scale=0.1)
    results = [pg.streamline(make(s), posterior, x, attention=attention)(x) for s in ("separate", style)]
    torch.testing.assert_close(results[0].mean, results[1].mean)
    torch.testing.assert_close(results[0].variance, results[1].variance)


@pytest.mark.parametrize("attention", ["variance", "covariance"])
def test_multi_head_attention_does_not_depend_on_the_weights_being_asked_for(attention: str) -> None:
    x = make_input(uncertain=True)
    module = make("MultiheadAttention")
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in named(module).items()})
    styles = ("MultiheadAttention", "MultiheadAttention, weights", "MultiheadAttention, positions first")
    results = [pg.streamline(make(s), posterior, x, attention=attention)(x) for s in styles]
    for other in results[1:]:
        torch.testing.assert_close(other.mean, results[0].mean)
        torch.testing.assert_close(other.variance, results[0].variance)


def test_one_value_as_query_key_and_value() -> None:
    """`softmax(X Xᵀ) X`: the value keeps its variance, query and key are its mean."""

    class Itself(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    x = make_input(uncertain=True)
    g = pg.streamline(Itself(), None, x)(x)
    p = torch.stack([attention_weights(x.mean[b], x.mean[b], causal=False) for b in range(BATCH)])
    torch.testing.assert_close(g.mean, p @ x.mean)
    torch.testing.assert_close(g.variance, p.square() @ x.variance)


def test_cross_attention() -> None:
    """Random queries on one sequence, fixed keys and values on another: then the weights are uncertain."""

    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.query(x), memory, memory)

    module, x, memory = Cross().double(), make_input(uncertain=True), make_input(uncertain=False)
    posterior = pg.DiagonalPosterior({"query.weight": torch.ones_like(module.query.weight)})
    g = pg.streamline(module, posterior, (x, memory))(x, memory)
    torch.testing.assert_close(g.mean, module(x.mean, memory).detach())
    assert (g.variance > 0).all()


def test_softmax_outside_attention_keeps_its_uncertainty() -> None:
    """Pooling by a learnt score, or a classifier's softmax, is no attention of queries on keys."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).softmax(-1)

    module, x = Pool().double(), make_input(uncertain=True)
    assert (pg.streamline(module, None, x)(x).variance > 0).all()


# -- what the plan says


def test_the_plan_names_parameters_without_effect() -> None:
    module, x = make("separate"), make_input(uncertain=False)
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in named(module).items()})
    plan = pg.streamline(module, posterior, x).plan
    line = next(line for line in str(plan).splitlines() if "no effect" in line)
    assert all(f"{part}.{kind}" in line for part in ("query", "key") for kind in ("weight", "bias"))
    assert not any(part in line for part in ("value.", "output."))


@pytest.mark.parametrize("style", ["separate", "eager", "MultiheadAttention"])
def test_the_plan_keeps_quiet_about_fixed_queries_and_keys(style: str) -> None:
    module, x = make(style), make_input(uncertain=False)
    name = "layer.out_proj.weight" if style == "MultiheadAttention" else "output.weight"
    plan = str(pg.streamline(module, pg.DiagonalPosterior({name: torch.ones(WIDTH, WIDTH)}).to(x.dtype), x).plan)
    assert "no effect" not in plan and "queries" not in plan


# -- the factored form


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any op returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.entries = max([self.entries, *self._sizes(result)])
        return result

    @staticmethod
    def _sizes(result: Any) -> Iterator[int]:
        return (t.numel() for t in pytree.tree_leaves(result) if isinstance(t, Tensor))


@pytest.mark.parametrize("attend", [fused, eager], ids=["fused", "eager"])
def test_no_covariance_per_token_is_ever_held(attend: Fused) -> None:
    heads, size, tokens = 4, 16, 64
    module = Separate(attend, heads, width=heads * size).double().eval()
    x = pg.Gaussian(*torch.rand(2, 1, tokens, heads * size, dtype=torch.float64).unbind())
    posterior = pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in named(module).items()})
    net = pg.streamline(module, posterior, x, attention="covariance")
    with torch.no_grad(), Largest() as largest:
        net(x)
    dense = tokens * heads * size * size
    assert largest.entries <= dense // 4, "a tensor as large as [tokens, heads, d, d] would fit into one seen"


@pytest.mark.parametrize("style", ["separate", "GPT-2", "grouped"])
def test_covariance_exported_compiled_and_split_equal_eager(style: str) -> None:
    module, x = make(style), make_input(uncertain=True)
    posterior = pg.DiagonalPosterior(make_variances(module, Parts._fields))
    net = pg.streamline(module, posterior, x, attention="covariance")
    whole = net(x)
    torch._dynamo.reset()
    exported = torch.export.export(net, (x,), strict=False).module()(x)
    compiled = torch.compile(net, fullgraph=True, backend="eager")(x)
    parts = [net(pg.Gaussian(x.mean[b : b + 1], x.variance[b : b + 1])) for b in range(BATCH)]
    split = pg.Gaussian(torch.cat([p.mean for p in parts]), torch.cat([p.variance for p in parts]))
    for other in (exported, compiled, split):
        torch.testing.assert_close(other.mean, whole.mean)
        torch.testing.assert_close(other.variance, whole.variance)


def test_joint_covariance_goes_through_attention() -> None:
    """`covariance="full"` keeps tokens and heads together; queries and keys are still fixed at their means."""
    module, m = make("separate"), make_input(uncertain=False)
    x = pg.Gaussian(m, covariance=random_psd(TOKENS * WIDTH, BATCH, 0.3, torch.Generator().manual_seed(6)))
    g = pg.streamline(module, None, x, covariance="full")(x)
    attend = module.attend
    for b in range(BATCH):

        def at_mean(t: Tensor, b: int = b) -> Tensor:
            q, k = (
                layer(m[b : b + 1]).view(1, TOKENS, HEADS, -1).transpose(1, 2) for layer in (module.query, module.key)
            )
            v = module.value(t.reshape(1, TOKENS, WIDTH)).view(1, TOKENS, HEADS, -1).transpose(1, 2)
            return module.output(attend(q, k, v).transpose(1, 2).reshape(1, TOKENS, WIDTH)).flatten()

        j = torch.func.jacrev(at_mean)(m[b].flatten())
        torch.testing.assert_close(g.covariance[b], (j @ x.covariance[b] @ j.mT).detach())


# -- one of several blocks


def test_fixed_attention_beside_one_that_keeps_value_covariance() -> None:
    """Only the second block is random: the first one is the plain model."""
    module = nn.Sequential(make("separate"), make("separate")).eval()
    variances = make_variances(module[1], SUBSETS["all"])
    posterior = pg.DiagonalPosterior({f"1.{name}": v for name, v in variances.items()})
    x = make_input(uncertain=False)
    g = pg.streamline(module, posterior, x, attention="covariance")(x)
    torch.testing.assert_close(g.mean, module(x).detach())
    torch.testing.assert_close(g.variance, expected(module[1], variances, module[0](x).detach(), True))
