"""Whole models: the streamlined mean is the model's own output, always, and the model is never touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import propagauss as pg
from posteriors.cases import make_posterior
from reference import assert_covariance_close, random_psd

# -- models


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.out(h + F.relu(self.second(h))) + x[:, :2]


class Dense(nn.Module):
    """Every layer sees the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(5, 2), nn.Linear(7, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.silu(layer(x))], dim=-1)
        return x


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.out(torch.relu(self.left(x) + self.right(y)))


class Heads(nn.Module):
    """Several outputs: nested containers, an index, and an input handed through."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.body, self.mean, self.stddev = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.body(x))
        mean, stddev = self.mean(h), F.softplus(self.stddev(h))
        if self.form == "tuple":
            return mean, stddev
        if self.form == "dict":
            return {"mean": mean, "stddev": stddev, "input": x}
        return {"both": (mean, [stddev]), "label": mean.argmax(-1), "none": None}


class TiedDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.offset = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.encoder(x)), self.encoder.weight.t(), self.offset)


class TiedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(self.first(x))))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h.relu_()
        h += 0.5
        h[:, 0] *= 2
        return self.second(h).mul_(0.3).add_(h)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.tensor([0.1, -0.4, 0.9]))
        self.register_buffer("width", torch.tensor([1.5, 0.7, 2.0]), persistent=False)
        self.register_buffer("order", torch.tensor([1, 0]))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x - self.centre) / self.width)[:, self.order] * self.width[:2]


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((3, 4), (3, 4), (4, 2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixer(nn.Module):
    """Layers over positions and over features of `[B, T, D]`, then the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.features, self.out = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(x.transpose(1, 2)).transpose(1, 2)
        x = x + F.gelu(self.features(x))
        return self.out(x.mean(1))


class OwnParameters(nn.Module):
    """A scale, an offset and a temperature next to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))
        self.temperature = nn.Parameter(torch.tensor([1.7]))
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x * self.scale) + self.offset) / self.temperature


class Options(nn.Module):
    """Ordinary Python: keyword arguments, loops, a branch on a setting."""

    def __init__(self, repeats: int = 2) -> None:
        super().__init__()
        self.layer, self.repeats = nn.Linear(3, 3), repeats

    def forward(self, x: Tensor, *, power: float = 2.0, mask: Tensor | None = None) -> Tensor:
        for _ in range(self.repeats):
            x = torch.sigmoid(self.layer(x))
        if mask is not None:
            x = x * mask
        return x**power


def frozen() -> nn.Module:
    model = mlp(nn.Tanh())
    model[0].requires_grad_(False)
    return model


def normalised() -> nn.Module:
    norm = nn.BatchNorm1d(4)
    nn.init.normal_(norm.weight)
    norm.running_mean, norm.running_var = torch.randn(4), torch.rand(4) + 0.5
    return nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def mlp(activation: nn.Module, hidden: int = 4, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4, **options), activation, nn.Linear(hidden, 2, **options))


@dataclass(frozen=True)
class Model:
    """A model and its positional inputs (their event shapes); `names` restricts the posterior."""

    make: Callable[[], nn.Module]
    events: tuple[tuple[int, ...], ...] = ((3,),)
    names: tuple[str, ...] | None = None


MODELS: dict[str, Model] = {
    "MLP": Model(lambda: mlp(nn.ReLU())),
    "one layer": Model(lambda: nn.Linear(3, 2)),
    "without bias": Model(lambda: mlp(nn.Tanh(), bias=False)),
    "nested": Model(
        lambda: nn.Sequential(
            nn.Identity(), nn.Sequential(mlp(nn.ReLU()), nn.Sequential(nn.ELU(), nn.Linear(2, 3))), nn.Tanh()
        )
    ),
    "images": Model(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.GELU(), nn.Linear(4, 6), nn.Unflatten(1, (2, 3))),
        ((3, 2, 2),),
    ),
    "skip": Model(Skip),
    "dense": Model(Dense),
    "two inputs": Model(TwoInputs, ((3,), (2,))),
    "tuple": Model(lambda: Heads("tuple")),
    "dict": Model(lambda: Heads("dict")),
    "nested outputs": Model(lambda: Heads("nested")),
    "tied decoder": Model(TiedDecoder),
    "tied twice": Model(TiedTwice),
    "frozen": Model(frozen, names=("2.weight", "2.bias")),
    "in-place": Model(InPlace),
    "in-place activations": Model(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True))
    ),
    "normalised": Model(normalised),
    "normalisation only": Model(normalised, names=("1.weight", "1.bias")),
    "softmax": Model(lambda: nn.Sequential(mlp(nn.ReLU()), nn.Softmax(-1))),
    "log-softmax": Model(lambda: nn.Sequential(mlp(nn.ReLU()), nn.LogSoftmax(-1))),
    "buffers": Model(Buffers),
    "SwiGLU": Model(SwiGLU),
    "sequence": Model(lambda: mlp(nn.ReLU()), ((2, 3),)),
    "mixer": Model(Mixer, ((2, 3),)),
    "own parameters": Model(OwnParameters),
    "one number": Model(lambda: nn.Sequential(mlp(nn.Tanh()), nn.Linear(2, 1), nn.Flatten(0))),
    "Python": Model(Options),
    "last layer": Model(lambda: mlp(nn.ReLU()), names=("2.weight", "2.bias")),
    "only biases": Model(lambda: mlp(nn.ReLU()), names=("0.bias", "2.bias")),
}

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    **{
        layer.__name__: layer
        for layer in (
            *(nn.ELU, nn.CELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU),
            *(nn.LogSigmoid, nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus),
            *(nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
        )
    },
    "LogSoftmax": lambda: nn.LogSoftmax(-1),
    "Softmax": lambda: nn.Softmax(-1),
    "Softmin": lambda: nn.Softmin(-1),
    "Threshold": lambda: nn.Threshold(0.1, 20.0),
}


def build(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name].make().to(dtype).eval()


def inputs(name: str, dtype: torch.dtype = torch.float64, batch: int = 3) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn((batch, *e), generator=generator, dtype=torch.float64).to(dtype) for e in MODELS[name].events
    )


def posterior_for(
    model: nn.Module, kind: str, names: tuple[str, ...] | None = None, scale: float = 0.1
) -> pg.Posterior:
    named = {n: p.detach() for n, p in model.named_parameters()}
    return make_posterior(kind, {n: named[n] for n in names or named}, scale)[0]


def leaves(output: Any) -> list[Any]:
    return pytree.tree_leaves(output, is_leaf=lambda v: isinstance(v, pg.Gaussian))


def assert_same_mean(output: Any, expected: Any, **tolerance: float) -> None:
    """Same structure; a Gaussian wherever the model returns floating-point numbers, the value itself elsewhere."""
    got, want = leaves(output), pytree.tree_leaves(expected)
    assert len(got) == len(want)
    bare = pytree.tree_map_only(pg.Gaussian, lambda g: 0, output, is_leaf=lambda v: isinstance(v, pg.Gaussian))
    assert pytree.tree_structure(bare) == pytree.tree_structure(expected)
    for g, e in zip(got, want, strict=True):
        if isinstance(e, Tensor) and e.is_floating_point():
            assert isinstance(g, pg.Gaussian)
            torch.testing.assert_close(g.mean, e.detach(), **tolerance)
            assert g.variance.shape == e.shape and g.variance.dtype == e.dtype
            assert g.variance.isfinite().all() and (g.variance >= 0).all()
        else:
            assert torch.equal(g, e) if isinstance(e, Tensor) else g == e


TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.float64: {"rtol": 1e-12, "atol": 1e-13}}
# every model with the least and with the most covariance; the other combinations on a few
SETTINGS = [
    *[(name, "diagonal", "diagonal", torch.float32) for name in MODELS],
    *[(name, "full", "full", torch.float64) for name in MODELS],
    *[
        (name, kind, covariance, dtype)
        for name in ("MLP", "nested outputs", "tied decoder", "normalised", "sequence", "SwiGLU")
        for kind, covariance, dtype in (
            ("diagonal", "full", torch.float32),
            ("kronecker", "diagonal", torch.float64),
            ("kronecker", "full", torch.float32),
            ("full", "diagonal", torch.float32),
        )
    ],
]


@pytest.mark.parametrize("name, kind, covariance, dtype", SETTINGS)
def test_mean_is_the_models_output(name: str, kind: str, covariance: str, dtype: torch.dtype) -> None:
    model, x = build(name, dtype), inputs(name, dtype)
    net = pg.streamline(model, posterior_for(model, kind, MODELS[name].names), x, covariance=covariance)
    out = net(*x)
    assert_same_mean(out, model(*x), **TOLERANCE[dtype])
    variances = [g.variance for g in leaves(out) if isinstance(g, pg.Gaussian)]
    assert any(v.max() > 0 for v in variances)


def test_every_activation_is_tried() -> None:
    skipped = {"MultiheadAttention", "Softmax2d"}  # attention, and images: not feed-forward networks
    assert set(ACTIVATIONS) == set(nn.modules.activation.__all__) - skipped


@pytest.mark.parametrize(
    "activation, covariance",
    [
        *[(a, "diagonal") for a in ACTIVATIONS],
        *[(a, "full") for a in ("GLU", "PReLU", "Softmax", "Softmin", "Tanhshrink")],
    ],
)
def test_mean_with_every_activation(activation: str, covariance: str) -> None:
    torch.manual_seed(0)
    model = mlp(ACTIVATIONS[activation](), hidden=2 if activation == "GLU" else 4).double().eval()
    x = torch.randn(3, 3, dtype=torch.float64)
    net = pg.streamline(model, posterior_for(model, "diagonal"), x, covariance=covariance)
    assert_same_mean(net(x), model(x), **TOLERANCE[torch.float64])


@pytest.mark.parametrize(
    "name",
    ["MLP", "images", "skip", "two inputs", "nested outputs", "in-place", "normalised", "softmax", "SwiGLU", "mixer"],
)
def test_moments_of_whole_models(name: str) -> None:
    """The mean moves away from the model's output, but less and less as the variance shrinks."""
    model, x = build(name), inputs(name)
    posterior = posterior_for(model, "diagonal", MODELS[name].names, scale=1e-10)
    out = pg.streamline(model, posterior, x, activation="moments")(*x)
    assert_same_mean(out, model(*x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["MLP", "skip", "dense", "sequence", "softmax"])
def test_moments_with_full_covariance(name: str) -> None:
    model, x = build(name), inputs(name)
    net = pg.streamline(model, posterior_for(model, "full"), x, covariance="full", activation="moments")
    for g in leaves(net(*x)):
        assert g.mean.isfinite().all()
        assert torch.linalg.eigvalsh(g.covariance).min() >= -1e-10 * g.covariance.abs().max()


# -- which parameters are random


@pytest.mark.parametrize("posterior", [None, pg.DiagonalPosterior({})], ids=["None", "empty"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_without_random_parameters(posterior: pg.Posterior | None, covariance: str) -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior, x, covariance=covariance)
    g = net(x)
    assert torch.equal(g.mean, model(x)) and torch.count_nonzero(g.variance) == 0
    assert len(net.plan) == 0 and net.plan.parameters == ()
    uncertain = pg.Gaussian(x, 0.1 * torch.ones_like(x))
    assert (pg.streamline(model, posterior, uncertain, covariance=covariance)(uncertain).variance > 0).all()


@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_selection_makes_the_rest_deterministic(kind: str) -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    named = {n: p.detach() for n, p in model.named_parameters()}
    posterior, dense = make_posterior(kind, named)
    net = pg.streamline(model, posterior.bind(named).select("2.*"), x, covariance="full")
    assert net.plan.parameters == ("2.bias", "2.weight")
    assert net.plan.untouched == 2
    # a last layer on a fixed input: Σ_ij h_i h_j Cov(W_ki, W_lj) and so on, by its Jacobian
    h = torch.relu(model[0](x)).detach()
    eye = torch.eye(2, dtype=torch.float64)
    jacobian = torch.cat([torch.einsum("kl,bi->bkli", eye, h).flatten(2), eye.expand(3, 2, 2)], -1)
    joint = dense[16:, 16:]
    torch.testing.assert_close(net(x).covariance, jacobian @ joint @ jacobian.mT)


def test_unused_parameters_are_named_in_a_warning() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "spare": nn.Linear(3, 2)})
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match=r"never uses.*spare\.bias, spare\.weight"):
        pg.streamline(model, posterior_for(model, "diagonal"), torch.zeros(2, 3))


# -- calls


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("example", [1, 2, 3])
@pytest.mark.parametrize("name", ["two inputs", "mixer", "one number"])
def test_any_batch_size_whatever_the_examples(name: str, example: int, covariance: str) -> None:
    model = build(name)
    net = pg.streamline(model, posterior_for(model, "diagonal"), inputs(name, batch=example), covariance=covariance)
    for batch in (0, 1, 2, 7):
        x = inputs(name, batch=batch)
        g = net(*x)
        torch.testing.assert_close(g.mean, model(*x).detach())
        assert g.variance.shape == g.mean.shape
        assert g.covariance.shape[0] == batch


def test_forms_of_the_example_and_of_calls() -> None:
    model, (x, y) = build("two inputs"), inputs("two inputs")
    posterior = posterior_for(model, "diagonal")
    expected = pg.streamline(model, posterior, (x, y))(x, y)
    by_position = pg.streamline(model, posterior, [x, y])
    by_name = pg.streamline(model, posterior, {"x": x, "y": y})
    for g in (by_position(x, y), by_position((x, y)), by_name(x=x, y=y), by_name({"x": x, "y": y})):
        assert torch.equal(g.mean, expected.mean) and torch.equal(g.variance, expected.variance)


def test_keyword_arguments_and_literals() -> None:
    model, (x,) = build("Python"), inputs("Python")
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64).expand(3, 3).contiguous()
    call = {"x": x, "power": 3.0, "mask": mask}
    net = pg.streamline(model, posterior_for(model, "diagonal"), call)
    g = net(**call)
    torch.testing.assert_close(g.mean, model(x, power=3.0, mask=mask).detach())
    assert torch.count_nonzero(g.variance[:, 1]) == 0 and (g.variance[:, 0] > 0).all()


def test_another_literal_than_the_examples_is_not_ignored() -> None:
    """A number is built into the traced graph, so a different one must not pass in silence."""
    model, (x,) = build("Python"), inputs("Python")
    net = pg.streamline(model, posterior_for(model, "diagonal"), {"x": x, "power": 3.0})
    with pytest.raises(pg.InputError, match=r"3\.0"):
        net(x=x, power=2.0)


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("uncertain", [(True, False), (False, True), (True, True)], ids=str)
def test_uncertain_inputs(uncertain: tuple[bool, bool], covariance: str) -> None:
    model, x = build("two inputs"), inputs("two inputs")
    given = [pg.Gaussian(v, 0.1 + v.square()) if u else v for v, u in zip(x, uncertain, strict=True)]
    posterior = posterior_for(model, "diagonal")
    net = pg.streamline(model, posterior, tuple(given), covariance=covariance)
    g = net(*given)
    torch.testing.assert_close(g.mean, model(*x).detach())
    increase = g.variance - pg.streamline(model, posterior, x)(*x).variance
    assert (increase >= 0).all() and (increase > 0).any()


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_uncertain_inputs_of_either_structure(covariance: str) -> None:
    """The example's structure does not bind later inputs; a covariance is reduced where only variances are kept."""
    model, (x,) = build("MLP"), inputs("MLP")
    c = random_psd(3, 3, 0.1, torch.Generator().manual_seed(0))
    full = pg.Gaussian(x, covariance=c)
    diagonal = pg.Gaussian(x, full.variance)
    nets = [pg.streamline(model, posterior_for(model, "diagonal"), e, covariance=covariance) for e in (full, diagonal)]
    for given in (full, diagonal):
        a, b = (net(given) for net in nets)
        assert a.is_full == (covariance == "full")
        torch.testing.assert_close(a.covariance, b.covariance)
    if covariance == "diagonal":
        torch.testing.assert_close(nets[0](full).variance, nets[0](diagonal).variance)


@pytest.mark.parametrize("activation", ["linearise", "moments"])
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
@pytest.mark.parametrize("kind", ["diagonal", "kronecker", "full"])
def test_gradients_reach_the_input(kind: str, covariance: str, activation: str) -> None:
    torch.manual_seed(0)
    model = mlp(nn.Tanh()).double()
    m = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    v = (0.1 + torch.rand(2, 3, dtype=torch.float64)).requires_grad_()
    example = pg.Gaussian(m.detach(), v.detach())
    net = pg.streamline(model, posterior_for(model, kind), example, covariance=covariance, activation=activation)

    def forward(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        g = net(pg.Gaussian(mean, variance))
        return g.mean, g.variance

    assert torch.autograd.gradcheck(forward, (m, v), fast_mode=True)
    for gradient in torch.autograd.grad(forward(m, v)[1].sum(), (m, v)):
        assert (gradient != 0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "activation, covariance", [("linearise", "diagonal"), ("linearise", "full"), ("moments", "full")]
)
def test_grad_modes(mode: Any, activation: str, covariance: str) -> None:
    model, (x,) = build("SwiGLU"), inputs("SwiGLU")
    posterior = posterior_for(model, "diagonal")
    expected = pg.streamline(model, posterior, x, covariance=covariance, activation=activation)(x)
    with mode():
        net = pg.streamline(model, posterior, x, covariance=covariance, activation=activation)
        g = net(x)
    torch.testing.assert_close(g.mean, expected.mean)
    torch.testing.assert_close(g.covariance, expected.covariance)
    assert not expected.mean.requires_grad  # nothing in a net is trainable


# -- the net as a module


def test_plan_is_a_table() -> None:
    model, x = build("skip"), inputs("skip")
    plan = pg.streamline(model, posterior_for(model, "diagonal"), x).plan
    lines = str(plan).splitlines()
    assert len(lines) == len(plan) + 3  # header, rule, summary
    for column in ("module", "op", "rule", "covariance", "shape"):
        assert column in lines[0]
    assert [s.path for s in plan if s.op == "aten.linear"] == ["first", "second", "out"]
    assert any(line.startswith("first ") and "aten.linear" in line and "B x 4" in line for line in lines)
    assert "random parameters" in lines[-1] and "6" in lines[-1]
    assert {s.structure for s in plan} == {"diagonal"}
    assert all(s.note for s in plan if s.op == "aten.add.Tensor")  # a residual sum says what it assumes


def test_plan_shows_nested_paths() -> None:
    model, x = build("nested"), inputs("nested")
    plan = pg.streamline(model, posterior_for(model, "diagonal"), x, covariance="full").plan
    assert "1.0.2" in str(plan) and "1.1.1" in str(plan)
    assert {s.structure for s in plan} == {"full"}


def test_code_and_repr_are_readable() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior_for(model, "diagonal"), x)
    assert "def forward" in net.code and "relu" in net.code
    assert "4 random parameters" in repr(net)
    assert not list(net.parameters()) and not net.training


@pytest.mark.parametrize(
    "name, kind, covariance",
    [
        ("MLP", "diagonal", "diagonal"),
        ("MLP", "kronecker", "full"),
        ("MLP", "full", "diagonal"),
        ("own parameters", "full", "full"),
        ("buffers", "diagonal", "diagonal"),
        ("normalised", "kronecker", "full"),
    ],
)
def test_state_dict_holds_everything(name: str, kind: str, covariance: str) -> None:
    """Loaded into a net of the same model with other weights, it becomes the same net."""
    model, x = build(name), inputs(name)
    other = build(name)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
        for b in other.buffers():
            if b.is_floating_point():
                b.add_(0.5)
    net = pg.streamline(model, posterior_for(model, kind), x, covariance=covariance)
    second = pg.streamline(other, posterior_for(other, kind, scale=3.0), x, covariance=covariance)
    expected = net(*x)
    assert not torch.allclose(second(*x).mean, expected.mean)
    file = BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file))
    assert torch.equal(second(*x).mean, expected.mean)
    assert torch.equal(second(*x).covariance, expected.covariance)


def test_deepcopy_is_independent() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    net = pg.streamline(model, posterior_for(model, "kronecker"), x, covariance="full")
    expected = net(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(x).mean, expected.mean) and torch.equal(twin(x).covariance, expected.covariance)
    with torch.no_grad():
        for b in twin.buffers():
            b.zero_()
    assert torch.equal(net(x).covariance, expected.covariance)


@pytest.mark.parametrize("kind, covariance", [("diagonal", "diagonal"), ("kronecker", "full")])
@pytest.mark.parametrize("activation", ["linearise", "moments"])
def test_casting_a_net(kind: str, covariance: str, activation: str) -> None:
    """`net.to(torch.float64)` takes double inputs from then on, and says so to others."""
    model, (x,) = mlp(nn.Tanh()).eval(), torch.randn(1, 4, 3)
    net = pg.streamline(model, posterior_for(model, kind), x, covariance=covariance, activation=activation)
    expected = net(x)
    net = net.to(torch.float64)
    g = net(x.double())
    assert g.mean.dtype == g.variance.dtype == torch.float64
    torch.testing.assert_close(g.mean.float(), expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(g.covariance.float(), expected.covariance, rtol=1e-3, atol=1e-5)
    with pytest.raises(pg.InputError, match="float32"):
        net(x)


# -- the user's model


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "keys": [list(model.state_dict()), [n for n, _ in (*model.named_parameters(), *model.named_buffers())]],
        "identity": [id(t) for t in (*model.parameters(), *model.buffers())],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "mode": [m.training for m in model.modules()],
        "modules": [id(m) for m in model.modules()],
        "hooks": [
            len(hooks)
            for m in model.modules()
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "device": [t.device for t in model.parameters()],
    }


@pytest.mark.parametrize(
    "name", ["MLP", "in-place", "normalised", "tied twice", "buffers", "frozen", "own parameters", "nested outputs"]
)
def test_the_model_is_untouched(name: str) -> None:
    model, x = build(name), inputs(name)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    given = [v.clone() for v in x]
    before = snapshot(model)
    net = pg.streamline(model, posterior_for(model, "diagonal", MODELS[name].names), x, covariance="full")
    net(*x)
    after = snapshot(model)
    for key in ("keys", "identity", "versions", "requires_grad", "mode", "modules", "hooks", "attributes", "device"):
        assert before[key] == after[key], key
    assert all(torch.equal(before["state"][k], after["state"][k]) for k in before["state"])
    for a, b in zip(before["grad"], after["grad"], strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(given, x, strict=True))


def test_hooks_and_training_mode_are_left_alone() -> None:
    """Where training mode makes no difference it is kept; a hook on the model stays, and sees no real forward."""
    model = mlp(nn.ReLU()).train()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(type(out)))
    net = pg.streamline(model, posterior_for(model, "diagonal"), torch.randn(2, 3))
    assert model.training and model[0].training and len(model[0]._forward_hooks) == 1
    before = len(seen)
    net(torch.randn(2, 3))
    assert len(seen) == before and torch.Tensor not in seen


def test_later_training_does_not_change_the_net() -> None:
    model, x = build("normalised"), inputs("normalised")
    net = pg.streamline(model, posterior_for(model, "diagonal"), x)
    expected = net(*x)
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(*x).square().sum().backward()
    optimiser.step()
    model.eval()
    assert torch.equal(net(*x).mean, expected.mean) and torch.equal(net(*x).variance, expected.variance)
    assert not torch.allclose(model(*x), expected.mean)


def test_later_changes_of_the_posterior_do_not_change_the_net() -> None:
    model, (x,) = build("MLP"), inputs("MLP")
    variances = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    net = pg.streamline(model, pg.DiagonalPosterior(variances), x)
    expected = net(x).variance
    for v in variances.values():
        v.mul_(9.0)
    assert torch.equal(net(x).variance, expected)


# -- the variance, where theory says what it must be


@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_one_hidden_layer_agrees_with_monte_carlo(covariance: str) -> None:
    """Independent weights make hidden units independent, so even variances alone are right to first order."""
    samples = 40_000
    torch.manual_seed(0)
    model = mlp(nn.Tanh()).double()
    x = torch.randn(3, 3, dtype=torch.float64)
    posterior = posterior_for(model, "diagonal", scale=1e-6)
    g = pg.streamline(model, posterior, x, covariance=covariance)(x)
    draws = posterior.sample(samples, torch.Generator().manual_seed(0))
    weights = {n: p.detach() + draws[n] for n, p in model.named_parameters()}
    values = torch.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    centred = values - values.mean(0)
    sampled = torch.einsum("sbi,sbj->bij", centred, centred) / samples
    if covariance == "diagonal":
        sampled = torch.diag_embed(sampled.diagonal(dim1=1, dim2=2))
    assert_covariance_close(g.covariance, sampled, samples, slack=0.01)


@pytest.mark.parametrize("kind", ["diagonal", "kronecker"])
@pytest.mark.parametrize("name", ["MLP", "nested", "without bias", "normalised", "images"])
def test_full_covariance_is_linear_in_the_weights(name: str, kind: str) -> None:
    """Layers independent of one another, tiny variance: `J Σ Jᵀ`, the GLM, at any depth."""
    model, (x,) = build(name), inputs(name)
    posterior = posterior_for(model, kind, scale=1e-9).bind(dict(model.named_parameters()))
    g = pg.streamline(model, posterior, x, covariance="full")(x)
    named = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)).flatten(1))(named)
    torch.testing.assert_close(g.covariance, posterior.quadratic(jacobian), rtol=1e-5, atol=1e-15)


def test_diagonal_covariance_forgets_what_deeper_layers_share() -> None:
    """Two hidden layers: hidden units are correlated, the full structure knows, the diagonal one does not."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    posterior = posterior_for(model, "diagonal", scale=1e-6)
    full, diagonal = (pg.streamline(model, posterior, x, covariance=c)(x) for c in ("full", "diagonal"))
    assert ((full.variance - diagonal.variance).abs() > 0.01 * full.variance).any()
    assert (diagonal.variance / full.variance > 0.1).all() and (diagonal.variance / full.variance < 10).all()


# -- full covariance, a few samples at a time


def test_a_batch_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of joint covariances is bounded: large batches go through in parts, with the same result."""
    monkeypatch.setattr(
        "propagauss.network.streamlined.WORKING_BYTES", 4 * 4 * 6**2 * 3
    )  # room for three samples of six entries
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    random = pg.DiagonalPosterior({n: 0.01 * torch.ones_like(p) for n, p in model.named_parameters()})
    mean, variance = torch.randn(8, 4, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
    for x in (mean, pg.Gaussian(mean, variance=variance), pg.Gaussian(mean, covariance=torch.diag_embed(variance))):
        net = pg.streamline(model, random, x, covariance="full")
        sizes: list[int] = []
        monkeypatch.setattr(net.body, "forward", _counting(net.body.forward, sizes))
        parts, whole = net(x), net._whole(net.leaves(x))[0]
        assert sizes == [3, 3, 2, 8]
        torch.testing.assert_close(parts.mean, whole.mean)
        torch.testing.assert_close(parts.covariance, whole.covariance)


def _counting(forward: Any, sizes: list[int]) -> Any:
    def counted(x: Any) -> Any:
        sizes.append(x.shape[0])
        return forward(x)

    return counted
