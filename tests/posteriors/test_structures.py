"""The posterior structures: each against its dense covariance, and through a file and back."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import propagauss as pg
from posteriors.cases import STRUCTURES, kronecker_covariance, kronecker_factors, make_posterior
from propagauss.posteriors import SpectralPosterior, files
from reference import assert_covariance_close, random_psd

SAMPLES = 50_000


class Shapes(nn.Module):
    """Parameters of every kind: a matrix, vectors, a convolution kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.kernel = nn.Parameter(torch.zeros(2, 2, 2))
        self.head = nn.Linear(2, 2, bias=False)


PARAMETERS = {n: p.detach().double() for n, p in Shapes().named_parameters()}
NAMES = tuple(PARAMETERS)
each = pytest.mark.parametrize("kind", STRUCTURES)
joint = pytest.mark.parametrize("kind", ["full", "spectral"])


def bound(kind: str) -> tuple[pg.Posterior, Tensor]:
    posterior, dense = make_posterior(kind, PARAMETERS)
    return posterior.bind(PARAMETERS), dense


def span(name: str) -> slice:
    start = 0
    for other in NAMES:
        if other == name:
            return slice(start, start + PARAMETERS[name].numel())
        start += PARAMETERS[other].numel()
    raise KeyError(name)


# -- against the dense covariance


@each
def test_dense(kind: str) -> None:
    posterior, dense = bound(kind)
    assert posterior.names == NAMES
    assert posterior.dtype == torch.float64
    torch.testing.assert_close(posterior.to_dense(), dense)
    for name, p in PARAMETERS.items():
        block = dense[span(name), span(name)]
        torch.testing.assert_close(posterior.covariance(name), block)
        assert posterior.variance(name).shape == p.shape
        torch.testing.assert_close(posterior.variance(name), block.diagonal().reshape(p.shape))
    assert type(posterior).__name__ in repr(posterior) and "first.weight" in repr(posterior)


@joint
def test_block_between_parameters(kind: str) -> None:
    posterior, dense = bound(kind)
    assert isinstance(posterior, pg.FullPosterior)
    cross = posterior.block("first.bias", "first.weight")
    torch.testing.assert_close(cross, dense[span("first.bias"), span("first.weight")])


@each
def test_sample(kind: str) -> None:
    posterior, dense = bound(kind)
    draws = posterior.sample(SAMPLES, torch.Generator().manual_seed(0))
    assert {n: d.shape for n, d in draws.items()} == {n: (SAMPLES, *p.shape) for n, p in PARAMETERS.items()}
    flat = torch.cat([draws[n].flatten(1) for n in NAMES], 1)
    assert (flat.mean(0).abs() <= 6 * (dense.diagonal() / SAMPLES).sqrt()).all()
    assert_covariance_close(dense, flat.mT @ flat / SAMPLES, SAMPLES)
    again = posterior.sample(3, torch.Generator().manual_seed(1)), posterior.sample(3, torch.Generator().manual_seed(1))
    assert all(torch.equal(again[0][n], again[1][n]) for n in NAMES)


@each
def test_quadratic(kind: str) -> None:
    posterior, dense = bound(kind)
    generator = torch.Generator().manual_seed(0)
    jacobian = {
        n: torch.randn((3, 2, *p.shape), dtype=torch.float64, generator=generator) for n, p in PARAMETERS.items()
    }
    flat = torch.cat([jacobian[n].flatten(2) for n in NAMES], -1)
    torch.testing.assert_close(posterior.quadratic(jacobian), flat @ dense @ flat.mT)


@each
def test_quadratic_of_a_part(kind: str) -> None:
    posterior, dense = bound(kind)
    jacobian = {n: torch.randn((3, 2, *PARAMETERS[n].shape), dtype=torch.float64) for n in ("kernel", "head.weight")}
    index = torch.cat([torch.arange(len(dense))[span(n)] for n in jacobian])
    flat = torch.cat([j.flatten(2) for j in jacobian.values()], -1)
    found = posterior.select(*jacobian).quadratic(jacobian)
    torch.testing.assert_close(found, flat @ dense[index][:, index] @ flat.mT)


@each
def test_scale_and_cast(kind: str) -> None:
    posterior, dense = bound(kind)
    posterior.details["prior_precision"] = 2.0
    torch.testing.assert_close(posterior.scale(0.3).to_dense(), 0.3 * dense)
    single = posterior.to(torch.float32)
    assert single.dtype == single.to_dense().dtype == torch.float32
    torch.testing.assert_close(single.to_dense(), dense.float(), rtol=1e-4, atol=1e-5)
    for changed in (posterior.scale(0.3), single, posterior.select("first.*")):
        assert changed.details == posterior.details
        assert type(changed) is type(posterior)
    torch.testing.assert_close(posterior.to_dense(), dense)  # the original is as it was


@each
@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_scale_keeps_it_a_covariance(kind: str, factor: float) -> None:
    with pytest.raises(pg.PosteriorError):
        bound(kind)[0].scale(factor)


@each
@pytest.mark.parametrize(
    "patterns, kept",
    [
        (("first.*",), ("first.weight", "first.bias")),
        ((["first.*", "kernel"],), ("kernel", "first.weight", "first.bias")),
        (("*.bias", "kernel"), ("kernel", "first.bias")),
        (("*",), NAMES),
        (("h?ad.[a-z]*",), ("head.weight",)),
    ],
)
def test_select(kind: str, patterns: tuple[str, ...], kept: tuple[str, ...]) -> None:
    posterior, dense = bound(kind)
    part = posterior.select(*patterns)
    index = torch.cat([torch.arange(len(dense))[span(n)] for n in kept])
    assert part.names == kept
    torch.testing.assert_close(part.to_dense(), dense[index][:, index])
    assert set(part.sample(2)) == set(kept)
    rebound = part.bind(PARAMETERS)
    torch.testing.assert_close(rebound.to_dense(), dense[index][:, index])
    assert posterior.names == NAMES


@each
def test_select_twice(kind: str) -> None:
    posterior, dense = bound(kind)
    part = posterior.select("first.*", "head.*").select("*.weight").scale(2.0)
    assert part.names == ("first.weight", "head.weight")
    torch.testing.assert_close(part.covariance("head.weight"), 2 * dense[span("head.weight"), span("head.weight")])


@each
def test_select_without_match(kind: str) -> None:
    posterior, _ = bound(kind)
    with pytest.raises(pg.PosteriorError, match=r"matches 'first.wieght'; did you mean 'first.weight'\?"):
        posterior.select("first.wieght")
    with pytest.raises(pg.PosteriorError, match=r"no parameter .*'nothing.like.it'.*kernel, first\.weight"):
        posterior.select("first.*", "nothing.like.it")


# -- the Kronecker forms


@pytest.mark.parametrize("damping", ["exact", "factored"])
@pytest.mark.parametrize("precision", [1e-3, 1.0, 30.0])
def test_kronecker_equals_brute_force(damping: str, precision: float) -> None:
    left, right = kronecker_factors(torch.Size((3, 2)), torch.Generator().manual_seed(0))
    posterior = pg.KroneckerPosterior({"w": (left, right), "b": (left,)}, precision, damping=damping)
    torch.testing.assert_close(posterior.covariance("w"), kronecker_covariance((left, right), precision, damping))
    torch.testing.assert_close(posterior.covariance("b"), kronecker_covariance((left,), precision, "exact"))


def test_kronecker_with_singular_factors() -> None:
    """Curvature of rank one, as a single training point gives: the prior alone holds the rest."""
    v, w = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), torch.tensor([0.5, -1.0], dtype=torch.float64)
    factors = (torch.outer(v, v), torch.outer(w, w))
    posterior = pg.KroneckerPosterior({"w": factors}, 0.1)
    torch.testing.assert_close(posterior.covariance("w"), kronecker_covariance(factors, 0.1, "exact"))


def test_kronecker_prior_precision_per_parameter() -> None:
    left, right = kronecker_factors(torch.Size((3, 2)), torch.Generator().manual_seed(0))
    posterior = pg.KroneckerPosterior({"w": (left, right), "b": (left,)}, {"w": 0.5, "b": 4.0})
    torch.testing.assert_close(posterior.covariance("w"), kronecker_covariance((left, right), 0.5, "exact"))
    torch.testing.assert_close(posterior.covariance("b"), kronecker_covariance((left,), 4.0, "exact"))


@pytest.mark.parametrize("damping", ["exact", "factored"])
def test_column_flattened_factors_are_converted(damping: str) -> None:
    left, right = kronecker_factors(torch.Size((3, 2)), torch.Generator().manual_seed(0))
    row = pg.KroneckerPosterior({"w": (left, right), "b": (left,)}, 0.4, damping)
    column = pg.KroneckerPosterior({"w": (right, left), "b": (left,)}, 0.4, damping, flatten="column")
    torch.testing.assert_close(row.to_dense(), column.to_dense())
    # entry (k, i) of a [3, 2] weight is at k*2+i row by row and at i*3+k column by column
    order = torch.arange(6).reshape(2, 3).t().flatten()
    by_column = kronecker_covariance((right, left), 0.4, damping)
    torch.testing.assert_close(column.covariance("w"), by_column[order][:, order])


# -- construction


SQUARE = torch.eye(2)
BAD = [
    pytest.param(lambda: pg.DiagonalPosterior({"w": -SQUARE}), "'w'.*negative.*-1", id="negative variance"),
    pytest.param(lambda: pg.DiagonalPosterior({"w": SQUARE / 0}), "'w'.*not finite", id="non-finite variance"),
    pytest.param(
        lambda: pg.DiagonalPosterior({"w": SQUARE, "b": SQUARE.double()}), "mixed dtypes", id="variance dtypes"
    ),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE,) * 3}), "'w'.*3 Kronecker factors", id="three factors"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (torch.ones(2, 3),)}), r"'w'.*\(2, 3\).*square", id="oblong"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE / 0,)}), "'w'.*not finite", id="non-finite factor"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (-SQUARE,)}), "'w'.*positive semi-definite", id="negative factor"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE,)}, 0.0), "prior precision.*'w'.*positive", id="no prior"),
    pytest.param(
        lambda: pg.KroneckerPosterior({"w": (SQUARE,)}, float("nan")), "prior precision.*'w'", id="nan precision"
    ),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE,)}, {"v": 1.0}), "'w'", id="precision missing"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE,)}, damping="Exact"), "damping.*'Exact'", id="damping"),
    pytest.param(lambda: pg.KroneckerPosterior({"w": (SQUARE,)}, flatten="rows"), "flatten.*'rows'", id="flatten"),
    pytest.param(
        lambda: pg.KroneckerPosterior({"w": (SQUARE,), "b": (SQUARE.double(),)}), "mixed dtypes", id="factor dtypes"
    ),
    pytest.param(lambda: pg.FullPosterior(["w"], torch.ones(2, 3)), r"\(2, 3\).*square", id="oblong covariance"),
    pytest.param(lambda: pg.FullPosterior(["w", "w"], SQUARE), "named twice", id="named twice"),
    pytest.param(lambda: pg.FullPosterior(["w"], SQUARE / 0), "not finite", id="non-finite covariance"),
    pytest.param(
        lambda: pg.FullPosterior(["w"], torch.tensor([[1.0, 2.0], [2.0, 1.0]])), "semi-definite", id="indefinite"
    ),
    pytest.param(
        lambda: pg.FullPosterior(["w"], torch.tensor([[1.0, 0.5], [0.1, 1.0]])), "not symmetric", id="asymmetric"
    ),
    pytest.param(lambda: pg.LowRankPosterior({"w": SQUARE}, {"v": SQUARE[None]}), "not both have v", id="directions"),
    pytest.param(lambda: pg.LowRankPosterior({"w": SQUARE}, {"w": SQUARE}), r"'w'.*\[K, \*that\]", id="one direction"),
    pytest.param(lambda: pg.LowRankPosterior({"w": SQUARE}, {"w": SQUARE[None] / 0}), "not finite", id="far direction"),
    pytest.param(
        lambda: pg.LowRankPosterior({"w": SQUARE, "v": SQUARE}, {"w": torch.ones(1, 2, 2), "v": torch.ones(3, 2, 2)}),
        "different numbers of directions: 1, 3",
        id="uneven directions",
    ),
    pytest.param(lambda: SpectralPosterior(["w"], SQUARE, torch.ones(3), 1.0), r"\[P, k\] and \[k\]", id="spectrum"),
    pytest.param(lambda: SpectralPosterior(["w", "w"], SQUARE, torch.ones(2), 1.0), "twice", id="named twice again"),
    pytest.param(lambda: SpectralPosterior(["w"], SQUARE, -torch.ones(2), 1.0), "negative", id="negative along"),
    pytest.param(lambda: SpectralPosterior(["w"], SQUARE, torch.ones(2), -1.0), "negative", id="negative across"),
    pytest.param(lambda: SpectralPosterior(["w"], 2 * SQUARE, torch.ones(2), 1.0), "orthonormal", id="not orthonormal"),
]


@pytest.mark.parametrize("make, message", BAD)
def test_refuses(make: Callable[[], pg.Posterior], message: str) -> None:
    with pytest.raises(pg.PosteriorError, match=message):
        make()


def test_does_not_keep_the_callers_graph() -> None:
    v = torch.ones(2, requires_grad=True)
    assert not pg.DiagonalPosterior({"w": v * 2}).variance("w").requires_grad
    assert not pg.FullPosterior(["w"], torch.diag(v * 2)).to_dense().requires_grad
    assert not pg.KroneckerPosterior({"w": (torch.diag(v * 2),)}).to_dense().requires_grad


# -- binding to a model


@each
def test_bind(kind: str) -> None:
    posterior, dense = make_posterior(kind, PARAMETERS)
    model = Shapes().double()
    torch.testing.assert_close(posterior.bind(dict(model.named_parameters())).to_dense(), dense)


@pytest.mark.parametrize("kind", ["kronecker", "full", "spectral"])
def test_sampling_asks_for_shapes(kind: str) -> None:
    posterior, _ = make_posterior(kind, PARAMETERS)
    with pytest.raises(pg.PosteriorError, match=r"shape of '\w+(\.\w+)?' is not known.*bind"):
        posterior.sample(1)


@each
def test_bind_refuses_a_wrong_name(kind: str) -> None:
    posterior, _ = make_posterior(kind, {"first.wight": PARAMETERS["first.weight"]})
    with pytest.raises(pg.PosteriorError, match=r"'first.wight'.*did you mean 'first.weight'\?.*named_parameters"):
        posterior.bind(PARAMETERS)


@each
@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (7,)], ids=str)
def test_bind_refuses_a_wrong_shape(kind: str, shape: tuple[int, ...]) -> None:
    posterior, _ = make_posterior(kind, {"first.weight": torch.zeros(shape, dtype=torch.float64)})
    with pytest.raises(pg.PosteriorError, match=r"first\.weight"):
        posterior.bind(PARAMETERS)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
def test_bind_refuses_a_transposed_weight(kind: str) -> None:
    """The sizes fit together, the entries would not."""
    posterior, _ = make_posterior(kind, {"first.weight": PARAMETERS["first.weight"].t()})
    with pytest.raises(pg.PosteriorError, match=r"first\.weight.*\(2, 3\)"):
        posterior.bind(PARAMETERS)


@each
def test_bind_refuses_another_dtype(kind: str) -> None:
    posterior, _ = bound(kind)
    with pytest.raises(pg.PosteriorError, match=r"'kernel'.*float32.*float64.*posterior\.to\(torch\.float32\)"):
        posterior.bind({n: p.float() for n, p in PARAMETERS.items()})


@each
def test_bind_again_to_another_model(kind: str) -> None:
    posterior, _ = bound(kind)
    other = PARAMETERS | {"first.weight": torch.zeros(4, 4, dtype=torch.float64)}
    with pytest.raises(pg.PosteriorError, match=r"first\.weight|entries together"):
        posterior.bind(other)


@joint
def test_full_posterior_needs_the_shapes_of_what_it_left_out(kind: str) -> None:
    """A selection of a joint covariance lies at offsets that only the shapes of all its parameters tell."""
    posterior, dense = make_posterior(kind, PARAMETERS)
    part = posterior.select("head.*")
    torch.testing.assert_close(part.bind(PARAMETERS).to_dense(), dense[span("head.weight"), span("head.weight")])
    with pytest.raises(pg.PosteriorError, match=r"also covers 'kernel'"):
        part.bind({"head.weight": PARAMETERS["head.weight"]})


# -- files


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_bound", [True, False], ids=["bound", "unbound"])
def test_round_trip(kind: str, dtype: torch.dtype, is_bound: bool, tmp_path: Path) -> None:
    posterior = (bound(kind) if is_bound else make_posterior(kind, PARAMETERS))[0].to(dtype)
    posterior.details["prior_precision"] = 0.25
    posterior.save(tmp_path / "p.safetensors")
    loaded = pg.load_posterior(tmp_path / "p.safetensors")
    assert type(loaded) is type(posterior)
    assert (loaded.names, loaded.dtype, loaded.details) == (posterior.names, dtype, {"prior_precision": 0.25})
    assert loaded.shapes == posterior.shapes
    fitted = {n: p.to(dtype) for n, p in PARAMETERS.items()}
    torch.testing.assert_close(loaded.bind(fitted).to_dense(), posterior.bind(fitted).to_dense())
    if is_bound:
        draws = [p.sample(2, torch.Generator().manual_seed(0)) for p in (posterior, loaded)]
        torch.testing.assert_close(draws[0], draws[1])


@each
def test_round_trip_after_select(kind: str, tmp_path: Path) -> None:
    part = bound(kind)[0].select("head.*", "first.bias").scale(0.5)
    part.save(tmp_path / "p.safetensors")
    loaded = pg.load_posterior(str(tmp_path / "p.safetensors"))
    assert loaded.names == part.names
    torch.testing.assert_close(loaded.to_dense(), part.to_dense())
    for name in part.names:
        assert loaded.shape(name) == PARAMETERS[name].shape
    torch.testing.assert_close(loaded.bind(PARAMETERS).select("head.*").to_dense(), part.select("head.*").to_dense())


def test_variances_that_share_memory_are_saved(tmp_path: Path) -> None:
    """Views of one flat vector, or one tensor for two parameters: ordinary for an optimiser's state."""
    flat = torch.rand(8)
    shared = pg.DiagonalPosterior({"w": flat[:6].reshape(2, 3), "b": flat[6:], "c": flat[6:]})
    shared.save(tmp_path / "p.safetensors")
    loaded = pg.load_posterior(tmp_path / "p.safetensors")
    assert all(torch.equal(loaded.variance(n), shared.variance(n)) for n in "wbc")


def test_empty_posterior_is_saved(tmp_path: Path) -> None:
    pg.DiagonalPosterior({}).save(tmp_path / "p.safetensors")
    assert pg.load_posterior(tmp_path / "p.safetensors").names == ()


def test_saved_files_are_as_readable_as_others(tmp_path: Path) -> None:
    """The temporary file must not leave its private mode behind."""
    previous = os.umask(0o022)
    try:
        bound("diagonal")[0].save(tmp_path / "p.safetensors")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "p.safetensors").stat().st_mode) == 0o644


def test_interrupted_save_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.safetensors"
    old, _ = bound("diagonal")
    old.save(path)
    before = path.read_bytes()

    def torn(tensors: Any, filename: str, metadata: Any = None) -> None:
        Path(filename).write_bytes(before[:50])
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        old.scale(2.0).save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["p.safetensors"]
    assert torch.equal(pg.load_posterior(path).to_dense(), old.to_dense())


def header(**changes: Any) -> dict[str, str]:
    meta = {"names": ["w"], "details": {}, "shapes": {"w": [2]}}
    return {
        "format": files.FORMAT,
        "version": str(files.VERSION),
        "kind": "diagonal",
        "meta": json.dumps(meta),
    } | changes


def write(path: Path, metadata: dict[str, str] | None, **tensors: Tensor) -> None:
    save_file(tensors or {"w": torch.ones(2)}, path, metadata=metadata)


def truncated(path: Path, keep: float) -> None:
    bound("full")[0].save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])


CORRUPT: dict[str, Callable[[Path], Any]] = {
    "missing": lambda p: None,
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("not a posterior, just some text that is long enough"),
    "pickle": lambda p: torch.save({"w": torch.ones(2)}, p),
    "directory": lambda p: p.mkdir(),
    "truncated header": lambda p: truncated(p, 0.05),
    "truncated tensors": lambda p: truncated(p, 0.9),
    "no metadata": lambda p: write(p, None),
    "foreign format": lambda p: write(p, {"format": "pt"}),
    "unknown kind": lambda p: write(p, header(kind="low-rank")),
    "newer version": lambda p: write(p, header(version=str(files.VERSION + 1))),
    "nonsense version": lambda p: write(p, header(version="one")),
    "no version": lambda p: write(p, {k: v for k, v in header().items() if k != "version"}),
    "meta is not json": lambda p: write(p, header(meta="{")),
    "no meta": lambda p: write(p, {k: v for k, v in header().items() if k != "meta"}),
    "meta without names": lambda p: write(p, header(meta=json.dumps({"details": {}, "shapes": {}}))),
    "tensor missing": lambda p: write(p, header(), other=torch.ones(2)),
    "factors missing": lambda p: write(p, header(kind="kronecker"), w=torch.ones(2)),
    "covariance missing": lambda p: write(p, header(kind="full"), w=torch.ones(2)),
    "vectors missing": lambda p: write(p, header(kind="spectral"), w=torch.ones(2)),
    "deep meta": lambda p: write(p, header(meta="[" * 100_000)),
    "meta is a list": lambda p: write(p, header(meta="[]")),
    "shapes as a list": lambda p: write(p, header(meta=json.dumps({"names": ["w"], "details": {}, "shapes": [2]}))),
    "shape as text": lambda p: write(p, header(meta=json.dumps({"names": ["w"], "details": {}, "shapes": {"w": "2"}}))),
    "details as a list": lambda p: write(p, header(meta=json.dumps({"names": ["w"], "details": [1], "shapes": {}}))),
    "details as texts": lambda p: write(
        p, header(meta=json.dumps({"names": ["w"], "details": {"a": "b"}, "shapes": {}}))
    ),
    "names as a number": lambda p: write(p, header(meta=json.dumps({"names": 3, "details": {}, "shapes": {}}))),
    "names as lists": lambda p: write(p, header(meta=json.dumps({"names": [["w"]], "details": {}, "shapes": {}}))),
    "float8": lambda p: write(p, header(), w=torch.ones(2).to(torch.float8_e4m3fn)),
    "whole numbers": lambda p: write(p, header(), w=torch.ones(2, dtype=torch.int64)),
    "complex": lambda p: write(p, header(), w=torch.ones(2, dtype=torch.complex64)),
    "factors of other shapes": lambda p: write(
        p, header(kind="kronecker"), **{f"{k}:w": torch.ones(n) for n, k in enumerate(("left", "right", "variance"))}
    ),
    "huge version": lambda p: write(p, header(version="9" * 5000)),
    "negative variance": lambda p: write(p, header(), w=-torch.ones(2)),
}


@pytest.mark.parametrize("damage", CORRUPT)
def test_unreadable_files(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    CORRUPT[damage](path)
    with pytest.raises(pg.PosteriorError) as error:
        pg.load_posterior(path)
    assert "p.safetensors" in str(error.value)


def test_newer_files_say_upgrade(tmp_path: Path) -> None:
    write(tmp_path / "p.safetensors", header(version=str(files.VERSION + 1)))
    with pytest.raises(pg.PosteriorError, match=r"newer propagauss.*upgrade"):
        pg.load_posterior(tmp_path / "p.safetensors")


def test_full_covariance_of_a_part_is_that_block() -> None:
    """Order matters: the bias named before the weight."""
    dense = random_psd(8, generator=torch.Generator().manual_seed(0))
    posterior = pg.FullPosterior(["first.bias", "first.weight"], dense).bind(PARAMETERS)
    torch.testing.assert_close(posterior.covariance("first.bias"), dense[:2, :2])
    torch.testing.assert_close(posterior.covariance("first.weight"), dense[2:, 2:])
    torch.testing.assert_close(posterior.block("first.weight", "first.bias"), dense[2:, :2])
