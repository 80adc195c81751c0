"""Gaussian: what users read from it, and the algebra that rules are written with, in both structures."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import propagauss as pg
from propagauss.gaussian import check_psd, symmetric_root
from propagauss.rules.elementwise.arithmetic import add, multiply
from propagauss.rules.registry import FUNCTIONS
from propagauss.structures import STRUCTURES
from reference import random_psd

SAMPLES = 100_000
BATCH, EVENT = 2, (3, 2)


def example(structure: str, event: tuple[int, ...] = EVENT, batch: int = BATCH) -> pg.Gaussian:
    generator = torch.Generator().manual_seed(0)
    m = torch.randn((batch, *event), dtype=torch.float64, generator=generator)
    c = random_psd(m[0].numel(), batch, generator=generator)
    if structure == "full":
        return pg.Gaussian(m, covariance=c)
    return pg.Gaussian(m, c.diagonal(dim1=1, dim2=2).reshape(m.shape))


both = pytest.mark.parametrize("structure", ["diagonal", "full"])


@both
def test_properties(structure: str) -> None:
    g = example(structure)
    assert g.structure == structure
    assert g.is_full == (structure == "full")
    assert g.shape == (BATCH, *EVENT) == g.variance.shape == g.stddev.shape
    assert g.covariance.shape == (BATCH, 6, 6)
    assert (g.dtype, g.device) == (torch.float64, torch.device("cpu"))
    torch.testing.assert_close(g.covariance.diagonal(dim1=1, dim2=2).reshape(g.shape), g.variance)
    torch.testing.assert_close(g.stddev.square(), g.variance)
    if structure == "diagonal":
        assert torch.equal(g.covariance, torch.diag_embed(g.variance.flatten(1)))
    assert "Gaussian" in repr(g) and structure in repr(g) and "(2, 3, 2)" in repr(g)


def test_takes_variance_by_position() -> None:
    g = pg.Gaussian(torch.zeros(2, 3), torch.ones(2, 3))
    assert not g.is_full and torch.equal(g.variance, torch.ones(2, 3))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (2, 1), (4,)])
def test_unusual_shapes(shape: tuple[int, ...]) -> None:
    n = torch.Size(shape[1:]).numel()
    for g in (
        pg.Gaussian(torch.zeros(shape), torch.ones(shape)),
        pg.Gaussian(torch.zeros(shape), covariance=torch.eye(n).expand(shape[0], n, n)),
    ):
        assert g.variance.shape == shape
        assert g.covariance.shape == (shape[0], n, n)


BAD = [
    pytest.param(lambda: pg.Gaussian(torch.zeros(2)), "either variance= .* or covariance=", id="neither"),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(2, 1), torch.zeros(2, 1), covariance=torch.zeros(2, 1, 1)),
        "either variance= .* or covariance=",
        id="both",
    ),
    pytest.param(lambda: pg.Gaussian(torch.zeros(2, 3), torch.zeros(2, 1)), r"\(2, 1\).*\(2, 3\)", id="no broadcast"),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(2, 3), covariance=torch.eye(3)), r"\(3, 3\).*\[2, 3, 3\]", id="no batch"
    ),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(2, 3, 2), covariance=torch.zeros(2, 3, 3)), r"\[2, 6, 6\]", id="event size"
    ),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(2, dtype=torch.long), torch.zeros(2, dtype=torch.long)),
        "floating-point mean.*int64",
        id="integers",
    ),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(2), torch.zeros(2, dtype=torch.float64)), "float32.*float64.*to()", id="dtypes"
    ),
    pytest.param(lambda: pg.Gaussian(torch.zeros(2), torch.tensor([1.0, -2.0])), "negative.*-2", id="negative"),
    pytest.param(lambda: pg.Gaussian(torch.zeros(2), torch.tensor([1.0, torch.nan])), "not finite", id="nan"),
    pytest.param(lambda: pg.Gaussian(torch.zeros(2), torch.tensor([1.0, torch.inf])), "not finite", id="inf"),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(1, 2), covariance=torch.tensor([[[1.0, 2.0], [2.0, 1.0]]])),
        "not positive semi-definite.*-1",
        id="indefinite",
    ),
    pytest.param(
        lambda: pg.Gaussian(torch.zeros(1, 2), covariance=torch.tensor([[[1.0, 0.5], [0.2, 1.0]]])),
        "not symmetric",
        id="asymmetric",
    ),
]


@pytest.mark.parametrize("make, message", BAD)
def test_refuses(make: Callable[[], pg.Gaussian], message: str) -> None:
    with pytest.raises(pg.InputError, match=message):
        make()


@pytest.mark.parametrize("mean", [torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf, 0.0])], ids=["nan", "inf"])
def test_mean_is_not_checked_for_values(mean: Tensor) -> None:
    """What the model itself would accept, so must a Gaussian: the mean then shows where it went wrong."""
    assert torch.equal(pg.Gaussian(mean, torch.ones(2)).mean.isfinite(), mean.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_accepts_semidefinite_covariance_with_rounding(dtype: torch.dtype) -> None:
    root = torch.randn(4, 6, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    pg.Gaussian(torch.zeros(4, 6, dtype=dtype), covariance=root @ root.mT)
    pg.Gaussian(torch.zeros(4, 6, dtype=dtype), covariance=torch.zeros(4, 6, 6, dtype=dtype))
    check_psd(root @ root.mT * 1e-20, "tiny")


@both
def test_sample_moments(structure: str) -> None:
    g = example(structure)
    x = g.sample((SAMPLES,), torch.Generator().manual_seed(1))
    assert x.shape == (SAMPLES, BATCH, *EVENT)
    assert ((x.mean(0) - g.mean).abs() <= 6 * g.stddev / SAMPLES**0.5).all()
    centred = (x - x.mean(0)).reshape(SAMPLES, BATCH, 6)
    sampled = torch.einsum("sbi,sbj->bij", centred, centred) / SAMPLES
    d = g.covariance.diagonal(dim1=1, dim2=2)
    error = ((d.unsqueeze(-1) * d.unsqueeze(-2) + g.covariance.square()) / SAMPLES).sqrt()
    assert ((sampled - g.covariance).abs() <= 6 * error).all()


@both
def test_sample_is_reproducible(structure: str) -> None:
    g = example(structure)
    a, b = (g.sample((2, 3), torch.Generator().manual_seed(4)) for _ in range(2))
    assert a.shape == (2, 3, BATCH, *EVENT) and torch.equal(a, b)
    assert g.sample().shape == g.shape


def test_symmetric_root_of_a_singular_matrix() -> None:
    c = torch.ones(3, 3, dtype=torch.float64)
    root = symmetric_root(c)
    torch.testing.assert_close(root @ root.mT, c)


@both
def test_scale_to_and_detach(structure: str) -> None:
    g = example(structure)
    scaled = g.scale(2.5)
    assert scaled.structure == structure and torch.equal(scaled.mean, g.mean)
    torch.testing.assert_close(scaled.covariance, 2.5 * g.covariance)
    torch.testing.assert_close(g.scale(torch.tensor(0.5, dtype=torch.float64)).variance, 0.5 * g.variance)
    single = g.to(torch.float32)
    assert single.structure == structure
    assert single.mean.dtype == single.variance.dtype == single.covariance.dtype == torch.float32
    m = g.mean.clone().requires_grad_()
    grown = pg.Gaussian(m * 2, g.variance * m.exp())
    assert grown.mean.requires_grad and grown.variance.requires_grad
    fixed = grown.detach()
    assert not fixed.mean.requires_grad and not fixed.variance.requires_grad


@both
def test_is_a_pytree(structure: str) -> None:
    """So that `torch.export`, `torch.compile` and `vmap` take Gaussians as inputs and outputs."""
    g = example(structure)
    leaves, spec = pytree.tree_flatten({"out": [g, 1]})
    assert [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves] == [g.shape, leaves[1].shape, 1]
    back = pytree.tree_unflatten(leaves, spec)["out"][0]
    assert back.structure == structure
    assert torch.equal(back.mean, g.mean) and torch.equal(back.covariance, g.covariance)
    doubled = pytree.tree_map_only(Tensor, lambda t: 2 * t, g)
    torch.testing.assert_close(doubled.variance, 2 * g.variance)
    names = [str(path[0]) for path, _ in pytree.tree_flatten_with_path(g)[0]]
    assert names == [".mean", ".covariance" if structure == "full" else ".variance"]
    restored = pytree.treespec_loads(pytree.treespec_dumps(spec))
    assert pytree.tree_unflatten(leaves, restored)["out"][0].structure == structure


# -- the algebra of rules, against dense matrices


def dense(linear: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    """The matrix of a linear map of one sample, column by column: `[n', n]`."""
    n = torch.Size(shape[1:]).numel()
    return torch.stack([linear(e.reshape(1, *shape[1:])).flatten() for e in torch.eye(n, dtype=torch.float64)], 1)


MAPS = {
    "permute": lambda t: t.transpose(1, 2),
    "flatten": lambda t: t.flatten(1),
    "pick": lambda t: t[:, 1:],
    "copy": lambda t: t.repeat(1, 1, 2),
    "product": lambda t: t @ torch.arange(4, dtype=torch.float64).reshape(2, 2),
    "sum": lambda t: t.sum((1, 2)),
}


@pytest.mark.parametrize("name", MAPS)
def test_mapped_full(name: str) -> None:
    g, linear = example("full"), MAPS[name]
    out = g.mapped(linear(g.mean), linear)
    matrix = dense(linear, g.shape)
    assert out.is_full and torch.equal(out.mean, linear(g.mean))
    torch.testing.assert_close(out.covariance, matrix @ g.covariance @ matrix.mT)


@pytest.mark.parametrize("name", MAPS)
def test_mapped_diagonal(name: str) -> None:
    """Moving entries needs no `squared`; combining them does."""
    g, linear = example("diagonal"), MAPS[name]
    matrix = dense(linear, g.shape)

    def squared(t: Tensor) -> Tensor:
        return (t.flatten(1) @ matrix.square().mT).reshape(linear(t).shape)

    expected = (matrix @ g.covariance @ matrix.mT).diagonal(dim1=1, dim2=2).reshape(linear(g.mean).shape)
    torch.testing.assert_close(g.mapped(linear(g.mean), linear, squared).variance, expected)
    if name in ("permute", "flatten", "pick", "copy", "sum"):
        torch.testing.assert_close(g.mapped(linear(g.mean), linear).variance, expected)


@both
@pytest.mark.parametrize("batch", [0, 1])
def test_mapped_keeps_the_structure_of_small_batches(structure: str, batch: int) -> None:
    g = example(structure, batch=2)
    part = pytree.tree_map_only(Tensor, lambda t: t[:batch], g)
    out = part.mapped(part.mean.flatten(1), lambda t: t.flatten(1))
    assert out.mean.shape == out.variance.shape == (batch, 6)
    assert out.covariance.shape == (batch, 6, 6)


@both
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 4), (4,)], ids=str)
def test_expanded(structure: str, shape: tuple[int, ...]) -> None:
    """Copies of one entry are one random number: fully correlated, which only the full structure can say."""
    target = torch.Size((2, 3, 4))
    m = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # a value without batch is one run of entries, shared by every sample
    batch = shape[0] if len(shape) == 3 else 1
    c = random_psd(m.numel() // batch, batch, generator=torch.Generator().manual_seed(1))
    if structure == "full":
        g = pg.Gaussian.full(m, c)
    else:
        g = pg.Gaussian.diagonal(m, c.diagonal(dim1=1, dim2=2).reshape(shape))
    out = g.expanded(target)
    assert out.structure == structure
    assert torch.equal(out.mean, m.expand(target))
    variance = c.diagonal(dim1=1, dim2=2).reshape(shape).expand(target)
    torch.testing.assert_close(out.variance, variance)
    if structure == "full":
        inner = (1, *shape[1:]) if len(shape) == 3 else (1, *(1,) * (2 - len(shape)), *shape)
        matrix = dense(lambda t: t.expand(1, *target[1:]), torch.Size(inner))
        expected = (matrix @ c @ matrix.mT).expand(2, -1, -1)
        torch.testing.assert_close(out.covariance, expected)


@both
def test_expanded_to_its_own_shape_is_itself(structure: str) -> None:
    g = example(structure)
    assert g.expanded(g.shape) is g


@both
@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 2), (1, 3, 1), (2,), ()], ids=str)
def test_scaled(structure: str, shape: tuple[int, ...]) -> None:
    g = example(structure)
    factor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    out = g.scaled(g.mean + 1, factor)
    d = torch.diag_embed(factor.expand(g.shape).reshape(BATCH, 6))
    assert out.structure == structure and torch.equal(out.mean, g.mean + 1)
    torch.testing.assert_close(out.covariance, d @ g.covariance @ d)


@both
def test_gated(structure: str) -> None:
    """A gate is its own square; true and false are as good as numbers."""
    g = example(structure)
    gate = g.mean > 0
    expected = g.scaled(g.mean.relu(), gate.to(g.dtype))
    for out in (g.gated(g.mean.relu(), gate), g.gated(g.mean.relu(), gate.to(g.dtype))):
        assert out.structure == structure and out.covariance.dtype == g.dtype and torch.equal(out.mean, expected.mean)
        assert torch.equal(out.covariance, expected.covariance)


@both
@pytest.mark.parametrize("shape", [(2, 6), (6, 2), (2, 3, 1, 2), (-1,)], ids=str)
def test_reshaped(structure: str, shape: tuple[int, ...]) -> None:
    """The entries keep their order, and runs of them are samples, so that a joint covariance stays as it is."""
    g = example(structure)
    out, moved = g.reshaped(shape), g.mapped(g.mean.reshape(shape), lambda t: t.reshape(shape))
    assert out.structure == structure and torch.equal(out.mean, moved.mean)
    assert torch.equal(out.variance, moved.variance) and torch.equal(out.stored, moved.stored)


@both
def test_split(structure: str) -> None:
    g = example(structure)
    parts = g.split(g.mean.split([1, 2], 1), lambda t: t.split([1, 2], 1))
    assert [p.shape for p in parts] == [(BATCH, 1, 2), (BATCH, 2, 2)]
    for part, which in zip(parts, (slice(0, 2), slice(2, 6)), strict=True):
        assert part.structure == structure
        torch.testing.assert_close(part.covariance, g.covariance[:, which, which])


@both
def test_matched(structure: str) -> None:
    """The variances that were asked for; other entries of `C` go through the slope."""
    g = example(structure)
    slope = g.mean.cos()
    variance = slope.square() * g.variance + 0.1
    out = g.matched(g.mean.sin(), variance, slope)
    torch.testing.assert_close(out.variance, variance)
    extra = torch.full((BATCH, 6), 0.1, dtype=torch.float64).diag_embed()
    torch.testing.assert_close(out.covariance, g.scaled(g.mean, slope).covariance + extra)


@both
def test_certain(structure: str) -> None:
    out = example(structure).certain(torch.ones(BATCH, 4, dtype=torch.float64))
    assert out.structure == structure and out.covariance.shape == (BATCH, 4, 4) and not out.covariance.any()


@both
def test_samples_kept_apart(structure: str) -> None:
    assert example(structure).samples == (BATCH if structure == "full" else 1)


@pytest.mark.parametrize("order", [1, -1], ids=["full first", "diagonal first"])
def test_structures_may_be_mixed(order: int) -> None:
    """As a rule of a user may do: the result is joint, and nothing of it is lost."""
    x, y = [example("full"), example("diagonal")][::order]
    both, total = multiply(x, y), add(x, y)
    cat = FUNCTIONS[torch.ops.aten.cat.default].function([x, y], 1)
    assert both.is_full and total.is_full and cat.is_full
    torch.testing.assert_close(total.covariance, x.covariance + y.covariance)
    a, b = (g.mean.flatten(1) for g in (x, y))
    outer = [t.unsqueeze(-1) * t.unsqueeze(-2) for t in (a, b)]
    expected = outer[1] * x.covariance + outer[0] * y.covariance + x.covariance * y.covariance
    torch.testing.assert_close(both.covariance, expected)
    torch.testing.assert_close(
        cat.covariance, torch.stack([torch.block_diag(*c) for c in zip(x.covariance, y.covariance, strict=True)])
    )


@both
def test_copies_share_the_structure(structure: str) -> None:
    g = example(structure)
    for twin in (copy.copy(g), copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert twin.kind is g.kind is STRUCTURES[structure]
        assert torch.equal(twin.covariance, g.covariance)


@both
def test_gradients_through_the_algebra(structure: str) -> None:
    g = example(structure, event=(3,))
    make = pg.Gaussian.full if structure == "full" else pg.Gaussian.diagonal
    stored = g.covariance if structure == "full" else g.variance

    def forward(m: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        x = make(m, s)
        y = x.scaled(m.sin(), m.cos()).mapped(m.sin().sum(1, True), lambda t: t.sum(1, True))
        return y.mean, y.covariance

    leaves = (g.mean.clone().requires_grad_(), stored.clone().requires_grad_())
    assert torch.autograd.gradcheck(forward, leaves)
