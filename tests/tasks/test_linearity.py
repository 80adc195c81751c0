"""Local linearity: the paper's formula, and each activation against Monte Carlo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import propagauss as pg
from propagauss.tasks import linearity


def model(*activations: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(5, 6)]
    for activation in activations:
        layers += [activation, nn.Linear(6, 6)]
    return nn.Sequential(*layers).eval()


def posterior(net: nn.Module, variance: float = 0.1) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in net.named_parameters()})


def test_error_against_the_formula():
    net, x = model(nn.GELU()).double(), torch.randn(10, 5, dtype=torch.float64)
    found = linearity.error(net, x, epsilons=(0.01, 0.5))
    for k, e in enumerate((0.01, 0.5)):
        for sign, values in ((1, found.plus), (-1, found.minus)):
            expected = (net(x * (1 + sign * e)) - net(x) * (1 + sign * e)).abs().mean(0)
            torch.testing.assert_close(values[k], expected)
    torch.testing.assert_close(found.output_range, net(x).amax(0) - net(x).amin(0))
    assert found.relative.shape == (2, 6) and len(found.plot().axes) == 1


def test_a_bias_is_not_bending():
    linear, x = nn.Linear(5, 3).double(), torch.randn(10, 5, dtype=torch.float64)
    expected = 0.1 * linear.bias.detach().abs()
    torch.testing.assert_close(linearity.error(linear, x, (0.1,)).plus[0], expected)
    assert linearity.error(linear, x, (0.1,), affine=True).relative.max() < 1e-12
    without = nn.Linear(5, 3, bias=False).double()
    assert linearity.error(without, x).relative.max() < 1e-12


class Written(nn.Module):
    """hardswish in pieces, whose kinks are at -3 and 3."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * nn.functional.relu6(h + 3) / 6


class Shifted(nn.Module):
    """A function that needs another tensor beside the uncertain one."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Buffer(torch.linspace(-1, 1, 6))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(h + self.shift).tanh()


@pytest.mark.parametrize("mode", ["linearise", "moments"])
def test_kinks_of_a_fused_function(mode):
    x = 3 * torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    lines = []
    for activation in (Written(), nn.Hardswish()):
        net = model(activation)
        lines.append(linearity.layers(pg.streamline(net, posterior(net, 1.0), x, activation=mode), x)[0])
    for name in ("input_stddev", "mean_error", "variance_ratio", "variance_error"):
        assert getattr(lines[0], name) == pytest.approx(getattr(lines[1], name), rel=1e-5)


@pytest.mark.parametrize("mode", ["linearise", "moments"])
def test_fused_function_of_other_tensors(mode):
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    net = model(Shifted())
    report = linearity.layers(pg.streamline(net, posterior(net), x, activation=mode), x)
    assert len(report) >= 1 and all(0 < layer.variance_ratio < 3 for layer in report)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("mode", ["linearise", "moments"])
def test_layers_against_monte_carlo(structure, mode):
    activations = (nn.ReLU(), nn.GELU(), nn.LeakyReLU(0.2), nn.Mish(), nn.Softplus())
    net, x = model(*activations), torch.randn(8, 5)
    streamlined = pg.streamline(net, posterior(net), x, covariance=structure, activation=mode)
    report = linearity.layers(streamlined, x)
    assert [layer.path for layer in report] == ["1", "3", "5", "7", "9"]
    assert [layer.op for layer in report][:2] == ["aten.relu", "aten.gelu"]
    names = [n for n, _ in net.named_parameters()]
    for k, (layer, g) in enumerate(zip(report, activations, strict=True)):
        chosen = {n: torch.full_like(net.get_parameter(n), 0.1) for n in names if int(n.split(".")[0]) <= 2 * k}
        before = net[: 2 * k + 1]
        source = pg.streamline(before, pg.DiagonalPosterior(chosen), x, covariance=structure, activation=mode)(x)
        mean, variance = source.mean.double(), source.variance.double()
        draws = g(mean + variance.sqrt() * torch.randn(20_000, *mean.shape).double())
        value, slope = torch.func.jvp(g, (mean,), (torch.ones_like(mean),))
        total = draws.var(0).sum()
        assert layer.entries == mean.numel()
        assert layer.input_stddev == pytest.approx(variance.mean().sqrt().item(), rel=1e-4)
        assert layer.variance_ratio == pytest.approx(((slope**2 * variance).sum() / total).item(), rel=0.04)
        error = (slope**2 * variance - draws.var(0)).abs().sum() / total
        assert layer.variance_error == pytest.approx(error.item(), abs=0.04)
        off = ((value - draws.mean(0)).square().sum() / total).sqrt()
        assert layer.mean_error == pytest.approx(off.item(), abs=0.04)


def test_small_posteriors_are_linear():
    net, x = model(nn.Tanh(), nn.SiLU()), torch.randn(8, 5)
    report = linearity.layers(pg.streamline(net, posterior(net, 1e-6), x), x)
    assert len(report) == 2
    for layer in report:
        assert layer.variance_ratio == pytest.approx(1, abs=1e-3) and layer.mean_error < 1e-2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h * torch.sigmoid(h) * scale)


def test_fused_functions_and_several_inputs():
    torch.manual_seed(0)
    net, x, scale = Gated().eval(), torch.randn(4, 5), torch.rand(4, 1)
    streamlined = pg.streamline(net, posterior(net, 1e-6), (x, scale))
    report = linearity.layers(streamlined, x, scale)
    assert len(report) >= 1
    assert all(layer.variance_ratio == pytest.approx(1, abs=1e-3) for layer in report)


def test_uncertain_inputs_and_nothing_uncertain():
    net, x = model(nn.ReLU()), torch.randn(4, 5)
    g = pg.Gaussian(x, variance=torch.full_like(x, 0.5))
    assert len(linearity.layers(pg.streamline(net, None, g), g)) == 1
    last = posterior(net).select("2.*")
    report = linearity.layers(pg.streamline(net, last, x), x)
    assert len(report) == 0 and "no activation" in str(report)
    with pytest.raises(pg.InputError, match="no activation"):
        _ = report.worst


def test_printed_table():
    net, x = model(nn.ReLU(), nn.ReLU()), torch.randn(4, 5)
    report = linearity.layers(pg.streamline(net, posterior(net), x), x)
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["module", "op"] and len(lines) == 5
    assert report.worst.path in lines[-1] and report[0].op == "aten.relu"


def test_whole_net_against_samples():
    net, x = model(), torch.randn(20, 5)  # linear: exact
    chosen = posterior(net)
    check = linearity.against_samples(pg.streamline(net, chosen, x), net, chosen, x, samples=2000)
    assert check.variance_ratio == pytest.approx(1, abs=0.05)
    assert check.mean_error < 3 * check.chance[0] and check.variance_error < 2 * check.chance[1]
    bent = model(nn.ReLU(), nn.ReLU())
    wide = posterior(bent, 1.0)
    other = linearity.against_samples(pg.streamline(bent, wide, x), bent, wide, x, samples=500)
    assert other.variance_error > 3 * other.chance[1] and "500 samples" in str(other)


def test_wrong_input():
    net, x = model(nn.ReLU()), torch.randn(4, 5)
    with pytest.raises(pg.InputError, match="streamlined net"):
        linearity.layers(net, x)  # type: ignore[arg-type]
    with pytest.raises(pg.InputError, match="epsilons"):
        linearity.error(net, x, epsilons=(-1.0,))
    with pytest.raises(pg.InputError, match="floating-point"):
        linearity.error(net, torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(pg.InputError, match="do not vary"):
        zero = pg.DiagonalPosterior({n: torch.zeros_like(p) for n, p in net.named_parameters()})
        linearity.against_samples(pg.streamline(net, zero, x), net, zero, x, samples=5)


def test_importing_propagauss_draws_nothing_in():
    import subprocess
    import sys

    code = "import sys, propagauss; print([m for m in ('matplotlib', 'sklearn') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
