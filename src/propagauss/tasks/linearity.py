"""Where linearisation holds: the error that the paper gives for a whole network, and the error at each activation.

`error` is about the function alone. `layers` takes the Gaussians that really reach the activations of a streamlined net
at given inputs, and compares the linearised mean and variance with the true ones of that function; `against_samples`
compares the output of the net with sampled weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from propagauss.checks import floating, kind, number
from propagauss.errors import InputError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_latent, as_net, as_tensor, call, check_eval, explained
from propagauss.network.linearised import Linearised
from propagauss.network.streamlined import Streamlined
from propagauss.posteriors import Posterior
from propagauss.predictive.baselines import MonteCarlo
from propagauss.rules.elementwise.activation import CLOSED, Elementwise, MomentMatched
from propagauss.rules.elementwise.moments import MOMENTS
from propagauss.rules.wrapping import Pointwise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPSILONS = tuple(10.0**k for k in range(-6, 1))
_OPS: dict[Any, Any] = {rule: op for op, rule in CLOSED.items()}


# -- the function alone


@dataclass(frozen=True)
class LinearityError:
    """Mean absolute errors over the inputs, for each `epsilon [K]` and output `[K, outputs]`, for both signs."""

    epsilon: Tensor
    plus: Tensor
    minus: Tensor
    output_range: Tensor  # [outputs], largest minus smallest over the inputs
    input_range: float

    @property
    def relative(self) -> Tensor:
        """The larger of the two signs, relative to the range of each output: `[K, outputs]`."""
        return self.plus.maximum(self.minus) / self.output_range

    def plot(self) -> Figure:
        """Each output as a curve over epsilon; needs matplotlib."""
        from propagauss.tasks.plots import as_numpy, curves

        return curves(as_numpy(self.epsilon), as_numpy(self.relative), "error relative to the range of the output")


@torch.no_grad()
def error(
    model: Callable[[Tensor], Any], x: Tensor, epsilons: Sequence[float] = EPSILONS, affine: bool = False
) -> LinearityError:
    """The paper's `δ_Lin = E_z |f(z (1 ± ε)) - f(z) (1 ± ε)|`, the expectation over the inputs `x`.

    It is zero for functions that are *proportional* to their input around each point. A ReLU network with biases is
    affine there, but not proportional: its `δ_Lin` is ε times its offset, before it bends anywhere. `affine=True`
    measures only the bending: `E_z |f(z (1 ± ε)) - f(z) ∓ ε J z|`, with `J` the Jacobian at `z`.
    """
    if isinstance(model, nn.Module):
        check_eval(model)
    elif not callable(model) or isinstance(model, type):
        raise InputError(f"the model is {kind(model)}; a module or a function of a tensor is needed")
    floating(x, "x")
    if x.dim() < 2 or not len(x):
        raise InputError("x must be a batch of floating-point inputs: a tensor [batch, ...] with at least one of them")
    if not x.isfinite().all():
        raise InputError("x has values that are not finite: remove or impute those points")
    if isinstance(epsilons, str) or not isinstance(epsilons, Iterable) or not len(epsilons):
        raise InputError(f"epsilons is {kind(epsilons)}; a list of numbers is needed, such as [0.01, 0.1]")
    epsilons = [number(e, "one of epsilons", "a number that is not negative", lambda v: v >= 0) for e in epsilons]

    def f(z: Tensor) -> Tensor:
        with explained(model, z):
            return as_tensor(call(model, z))

    centre = f(x)
    slope = torch.func.jvp(f, (x,), (x,))[1] if affine else centre
    signs = [[(f(x * (1 + e)) - centre - e * slope).abs().mean(0).flatten() for e in (s, -s)] for s in epsilons]
    return LinearityError(
        torch.tensor(epsilons, dtype=torch.float64),
        torch.stack([plus for plus, _ in signs]),
        torch.stack([minus for _, minus in signs]),
        (centre.amax(0) - centre.amin(0)).flatten(),
        (x.max() - x.min()).item(),
    )


# -- activation by activation


@dataclass(frozen=True)
class Layer:
    """One elementwise function of a streamlined net, over all its entries at the inputs given."""

    path: str
    op: str
    entries: int
    input_stddev: float  # root mean square
    mean_error: float  # of the linearised mean: root mean square, in units of that of the true standard deviation
    variance_ratio: float  # linearised over true, both summed over the entries
    variance_error: float  # |linearised - true|, summed over the entries, relative to the sum of the true

    @property
    def row(self) -> tuple[str, ...]:
        numbers = (self.input_stddev, self.mean_error, self.variance_ratio, self.variance_error)
        return (self.path, self.op, str(self.entries), *(f"{n:.3g}" for n in numbers))


@dataclass(frozen=True)
class Report:
    """How far linearisation is from the true moments, activation by activation; `print` shows it as a table."""

    layers: tuple[Layer, ...]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    @property
    def worst(self) -> Layer:
        """The one whose variances are furthest off."""
        if not self.layers:
            raise InputError("there is no activation downstream of anything random in this net")
        return max(self.layers, key=lambda layer: layer.variance_error)

    def __str__(self) -> str:
        header = ("module", "op", "entries", "input stddev", "mean error", "variance ratio", "variance error")
        rows = [header, *(layer.row for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        last = f"largest variance error: {self.worst.path}" if self.layers else "no activation has an uncertain input"
        return "\n".join([*(line.rstrip() for line in lines), last])


@torch.no_grad()
def layers(net: Streamlined, *x: Any, **named: Any) -> Report:
    """Compare, at every elementwise function, linearised moments with the true ones, for the inputs `x`.

    The Gaussians that reach a function are those of `net` itself, so errors made before it are not counted again: each
    line is about one approximation. The true moments are in closed form where there is one (piecewise polynomials
    among them), else by quadrature on panels that end where the function has a kink or jumps, in double precision.
    """
    if not isinstance(net, Streamlined):
        raise InputError(f"layers needs a streamlined net, but the net is {kind(net)}: use pg.streamline first")
    if isinstance(net, Linearised):
        raise InputError(
            "layers looks at the Gaussians that reach activations, and a linearised net carries none forwards: give "
            "pg.streamline(model, posterior, example), or compare the output with linearity.against_samples"
        )
    sites = [node for node in net.graph.nodes if _is_elementwise(net, node)]
    steps = [s for s in net.plan if s.rule == "elementwise" or s.rule.startswith("fused elementwise")]
    observer = _Observer(net, set(sites))
    observer.run(*net._flatten(x, named))
    paths = [(s.path, s.op) for s in steps] if len(steps) == len(sites) else [("?", n.name) for n in sites]
    found = []
    for (path, op), node in zip(paths, sites, strict=True):
        source, function, exact = _pieces(net, node, *observer.seen[node])
        if isinstance(source, Gaussian):
            found.append(_compare(path, op, source, function, exact))
    return Report(tuple(found))


class _Observer(fx.Interpreter):
    """Runs the graph as it is and keeps the arguments of some of its nodes."""

    def __init__(self, net: Streamlined, wanted: set[fx.Node]):
        super().__init__(net.body)
        self.wanted, self.seen = wanted, {}

    def run_node(self, n: fx.Node) -> Any:
        if n in self.wanted:
            self.seen[n] = self.fetch_args_kwargs_from_env(n)
        return super().run_node(n)


def _is_elementwise(net: Streamlined, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(net.body.get_submodule(str(node.target)), (Elementwise, MomentMatched))
    return node.op == "call_function" and node.target in _OPS


def _pieces(
    net: Streamlined, node: fx.Node, args: Any, kwargs: Any
) -> tuple[Any, Callable[[Tensor], Tensor], Callable[[Gaussian], Gaussian]]:
    """The input of an elementwise function, the function, and what gives its true moments; all in double precision."""
    source, *rest = (_double(a) for a in args)
    graph = None
    if node.op == "call_function":
        op = _OPS[node.target]
        settings = (tuple(rest), dict(kwargs))
        function, known = (lambda t: op(t, *rest, **kwargs)), MOMENTS.get(op)
    else:
        module: Any = net.body.get_submodule(str(node.target))
        inner = module.function
        single = isinstance(inner, Pointwise) and inner.at == 0
        settings = (inner.args[1:], inner.kwargs) if single else ((), {})
        function = _in_double(inner)
        known = MOMENTS.get(inner.op) if single else None
        graph = inner if isinstance(inner, fx.GraphModule) else None  # it says where a fused function has its kinks
    others = rest if node.op == "call_module" else []
    true = MomentMatched(function, known, settings, torch.float64, graph)
    return source, lambda t: function(t, *others), lambda x: true(x, *others)


def _in_double(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda t, *rest: inner(t, *rest).double()


def _double(value: Any) -> Any:
    if isinstance(value, Gaussian):
        return Gaussian.diagonal(value.mean.double(), value.variance.double())
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _compare(
    path: str,
    op: str,
    source: Gaussian,
    function: Callable[[Tensor], Tensor],
    exact: Callable[[Gaussian], Gaussian],
) -> Layer:
    linear, true = Elementwise(function)(source), exact(source)
    total, difference = true.variance.sum().item(), linear.variance - true.variance
    misses = (linear.mean - true.mean).square().sum().item()
    return Layer(
        path,
        op,
        source.mean.numel(),
        source.variance.mean().sqrt().item(),
        math.sqrt(misses / total) if total else 0.0,
        linear.variance.sum().item() / total if total else 1.0,
        difference.abs().sum().item() / total if total else 0.0,
    )


# -- the whole net


@dataclass(frozen=True)
class Check:
    """The latent of a net beside that of sampled weights, over all inputs and outputs."""

    samples: int
    mean_error: float  # root mean square, in units of that of the sampled standard deviation
    variance_ratio: float  # of the net over sampled, both summed
    variance_error: float  # |net - sampled|, summed, relative to the sum of the sampled

    @property
    def chance(self) -> tuple[float, float]:
        """What `mean_error` and `variance_error` would be by chance alone, were the samples Gaussian."""
        return 1 / math.sqrt(self.samples), 2 / math.sqrt(math.pi * (self.samples - 1))

    def __str__(self) -> str:
        mean, variance = self.chance
        return (
            f"against {self.samples} samples: mean off by {self.mean_error:.3g} standard deviations ({mean:.2g} by "
            f"chance), variance {self.variance_ratio:.3g} times the sampled one, off by {self.variance_error:.3g} of "
            f"it ({variance:.2g} by chance)"
        )


@torch.no_grad()
def against_samples(
    net: Any, model: nn.Module, posterior: Posterior, *x: Any, samples: int = 200, seed: int = 0, **named: Any
) -> Check:
    """Compare the Gaussian of `net` at `x` with mean and variance over sampled weights of the model itself.

    Of a net with `outputs=`, the chosen outputs are compared.
    """
    net = as_net(net)
    sampled = MonteCarlo(model, posterior, samples, seed)(*x, **named)
    ours = as_latent(call(net, *x, **named))
    if ours.chosen is not None:
        index = ours.chosen.index
        sampled, ours = (
            Gaussian.diagonal(g.mean.gather(-1, index), g.variance.gather(-1, index)) for g in (sampled, ours)
        )
    total = sampled.variance.double().sum().item()
    if total <= 1e-12 * sampled.mean.double().square().sum().item():  # rounding
        raise InputError("the sampled outputs do not vary: no variance of the posterior reaches them")
    difference = (ours.variance - sampled.variance).double().abs().sum().item()
    misses = (ours.mean - sampled.mean).double().square().sum().item()
    ratio = ours.variance.double().sum().item() / total
    return Check(samples, math.sqrt(misses / total), ratio, difference / total)
