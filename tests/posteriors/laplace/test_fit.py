"""fit_laplace against dense references: explicit Jacobians in float64, and KFAC sums written out as loops."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from posteriors.cases import Largest
from propagauss.errors import InputError
from propagauss.posteriors import (
    DiagonalPosterior,
    FullPosterior,
    KroneckerPosterior,
    fit_laplace,
    load_posterior,
    memory,
)
from propagauss.posteriors.laplace import gradients, kfac
from propagauss.posteriors.laplace.capture import patches
from propagauss.posteriors.laplace.evidence import Evidence

# -- models: every way in which a parameter can take part in a forward pass


class Custom(nn.Module):
    """Functional calls, a skip connection, a bare matmul, in-place activations, a scale that is no layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Sequential(nn.Linear(6, 4, bias=False)))
        self.mix = nn.Parameter(torch.randn(4, 5) / 2)
        self.scale = nn.Parameter(torch.rand(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = (x + self.inner(x)) @ self.mix
        return F.linear((h * self.scale).tanh_(), self.head.weight, self.head.bias)


class Shared(nn.Module):
    """One layer applied twice, and one weight held by two layers with biases of their own."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(4, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        return self.head(torch.tanh(self.second(torch.tanh(self.first(h)))))


class Sequence(nn.Module):
    """Tokens to a pooled prediction; `turned` puts time before batch, and the batch is as large as the sequence."""

    def __init__(self, turned: bool = False, folded: bool = False):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.turned, self.folded = turned, folded

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h.transpose(0, 1) if self.turned else h
        shape = h.shape[:2]
        h = h.reshape(-1, 4) if self.folded else h
        h = torch.tanh(self.body(h)).reshape(*shape, 5)
        return self.head(self.norm(h.mean(0 if self.turned else 1)))


class Conv1D(nn.Module):
    """GPT-2's linear layer: addmm with a weight stored as [in, out], on folded positions."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 5) / 2), nn.Parameter(torch.randn(5))
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        h = torch.addmm(self.bias, x.view(-1, 4), self.weight).view(*x.shape[:-1], 5)
        return SimpleNamespace(logits=self.head(torch.tanh(h).mean(1)))


class Inputless(nn.Module):
    """Parameters as the inputs of layers: the same for all samples, and once multiplied with itself."""

    def __init__(self):
        super().__init__()
        self.query, self.square = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 4) / 2)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        keys = self.body(self.query).mean(0)
        return self.head(torch.tanh((self.body(x) + keys) @ F.linear(self.square, self.square)))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 5), nn.Linear(2, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, a, b, scale=1.0):
        return self.head(torch.tanh(self.left(a) + scale * self.right(b)))


class Recurrent(nn.Module):
    """torch.vmap refuses the LSTM, so its gradients come one sample at a time."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def images(*layers):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


X, TOKENS, IMAGES = torch.randn(6, 4), torch.randint(0, 7, (6, 6)), torch.randn(6, 2, 5, 5)
CASES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), X),
    "norms": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Linear(6, 3)),
        X,
    ),
    "custom": (Custom, X),
    "shared": (Shared, X),
    "inputless": (Inputless, X),
    "sequence": (Sequence, TOKENS),
    "time first": (lambda: Sequence(turned=True), TOKENS),
    "time first, folded": (lambda: Sequence(turned=True, folded=True), TOKENS),
    "batch first, folded": (lambda: Sequence(folded=True), TOKENS),
    "addmm": (Conv1D, torch.randn(6, 2, 4)),
    "tuple": (TwoInputs, (X, torch.randn(6, 2))),
    "dict": (TwoInputs, {"a": X, "b": torch.randn(6, 2), "scale": 0.7}),
    "lstm": (Recurrent, torch.randn(6, 2, 4)),
    "convolution": (lambda: images(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU()), IMAGES),
    "grouped": (lambda: images(nn.Conv2d(2, 4, (3, 2), dilation=2, groups=2, padding="same"), nn.Tanh()), IMAGES),
    "circular": (lambda: images(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.Tanh()), IMAGES),
}


def make(name: str, seed: int = 0):
    torch.manual_seed(seed)
    build, x = CASES[name]
    model = build().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(), module.running_var.uniform_(0.5, 2)
    x = map_tensors(x, lambda t: t.double() if t.is_floating_point() else t)
    return model, x


def map_tensors(x, f):
    if isinstance(x, tuple):
        return tuple(map_tensors(t, f) for t in x)
    if isinstance(x, dict):
        return {k: map_tensors(t, f) for k, t in x.items()}
    return f(x) if isinstance(x, Tensor) else x


def call(model, x, parameters=None):
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    out = torch.func.functional_call(model, parameters or {}, args, kwargs)
    return getattr(out, "logits", out)


def loader(x, y, size=4):
    spans = [slice(i, i + size) for i in range(0, len(y), size)]
    return [(map_tensors(x, lambda t, s=s: t[s]), y[s]) for s in spans]


def jacobians(model, x, count: int, names) -> list[Tensor]:
    """`[C, P]` for each sample on its own, by one backward pass per output."""
    found = []
    for i in range(count):
        chosen = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if n in names}
        out = call(model, map_tensors(x, lambda t, i=i: t[i : i + 1]), chosen).reshape(-1)
        rows = [torch.autograd.grad(o, list(chosen.values()), retain_graph=True, allow_unused=True) for o in out]
        zeros = [torch.zeros_like(p) for p in chosen.values()]
        flat = [torch.cat([(z if g is None else g).flatten() for g, z in zip(r, zeros, strict=True)]) for r in rows]
        found.append(torch.stack(flat))
    return found


def dense_ggn(model, x, count: int, likelihood: str, names=None) -> Tensor:
    names = names or [n for n, _ in model.named_parameters()]
    total = 0
    for i, j in enumerate(jacobians(model, x, count, names)):
        hessian = torch.eye(j.shape[0], dtype=j.dtype)
        if likelihood == "classification":
            p = call(model, map_tensors(x, lambda t, i=i: t[i : i + 1])).detach().softmax(-1)[0]
            hessian = torch.diag(p) - torch.outer(p, p)
        total = total + j.T @ hessian @ j
    return total


def targets(likelihood: str, count: int = 6) -> Tensor:
    torch.manual_seed(5)
    return torch.randint(0, 3, (count,)) if likelihood == "classification" else torch.randn(count, 3).double()


# -- exact structures


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("name", CASES)
def test_diagonal_and_full_equal_explicit_jacobians(name, likelihood):
    model, x = make(name)
    h = dense_ggn(model, x, 6, likelihood)
    options = {"noise": 0.6} if likelihood == "regression" else {}
    precision = h / options.get("noise", 1.0) ** 2 + 0.4 * torch.eye(len(h), dtype=h.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.vmap cannot run")
        for structure in ("diagonal", "full"):
            data = loader(x, targets(likelihood))
            posterior = fit_laplace(model, data, likelihood, structure, prior_precision=0.4, **options)
            assert posterior.names == tuple(n for n, _ in model.named_parameters())
            expected = torch.diag(1 / precision.diagonal()) if structure == "diagonal" else torch.linalg.inv(precision)
            torch.testing.assert_close(posterior.to_dense(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("name", ["shared", "inputless", "time first"])
def test_size_of_batches_does_not_matter(name, size):
    model, x = make(name)
    h = dense_ggn(model, x, 6, "classification")
    posterior = fit_laplace(model, loader(x, targets("classification"), size), structure="full", prior_precision=1.0)
    expected = torch.linalg.inv(h + torch.eye(len(h)).double())
    torch.testing.assert_close(posterior.to_dense(), expected, rtol=1e-8, atol=1e-10)


def test_lstm_warns_that_it_is_slow():
    model, x = make("lstm")
    with pytest.warns(UserWarning, match="one sample at a time"):
        fit_laplace(model, loader(x, targets("classification")), prior_precision=1.0)


def test_small_memory_budget_changes_nothing(monkeypatch):
    for name in ("convolution", "norms", "sequence"):
        model, x = make(name)
        data = loader(x, targets("classification"))
        kinds = ("diagonal", "full", "kronecker")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = [fit_laplace(model, data, structure=s, prior_precision=1.0).to_dense() for s in kinds]
            with monkeypatch.context() as patch:
                patch.setattr(gradients, "BUDGET", 1)
                patch.setattr(kfac, "BUDGET", 1)
                small = [fit_laplace(model, data, structure=s, prior_precision=1.0).to_dense() for s in kinds]
        for a, b in zip(whole, small, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker"])
def test_no_jacobian_of_all_outputs(structure):
    torch.manual_seed(0)
    batch, classes = 16, 40
    model = nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, classes)).eval()
    data = [(torch.randn(batch, 20), torch.randint(0, classes, (batch,)))]
    size = sum(p.numel() for p in model.parameters())
    with Largest() as largest, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_laplace(model, data, structure=structure, prior_precision=1.0)
    assert 0 < largest.entries <= batch * size
    assert batch * size < batch * classes * size


# -- Kronecker


def kfac_by_loops(model: nn.Sequential, x: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """`A` and `B` of the linear layers of an nn.Sequential classifier, one sample and one column at a time."""
    sums: dict[str, Tensor] = {}
    for sample in x:
        values, h = {}, sample.unsqueeze(0)
        for i, layer in enumerate(model):
            a, h = h, layer(h)
            if isinstance(layer, nn.Linear):
                values[i] = (a.detach(), h)
        p = h.detach().softmax(-1)[0]
        for c in range(len(p)):
            column = p[c].sqrt() * (torch.eye(len(p), dtype=p.dtype)[c] - p)
            for i, (a, out) in values.items():
                (g,) = torch.autograd.grad(h[0] @ column, out, retain_graph=True)
                sums[f"b{i}"] = sums.get(f"b{i}", 0) + g.reshape(-1, g.shape[-1]).T @ g.reshape(-1, g.shape[-1])
                rows = a.reshape(-1, a.shape[-1])
                sums[f"a{i}"] = sums.get(f"a{i}", 0) + rows.T @ rows / (len(x) * len(rows) * len(p))
    factors = {}
    for i in [i for i, layer in enumerate(model) if isinstance(layer, nn.Linear)]:
        factors |= {f"{i}.weight": (sums[f"b{i}"], sums[f"a{i}"]), f"{i}.bias": (sums[f"b{i}"],)}
    return factors


class MeanOver(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize("positions", [1, 5])
def test_kronecker_equals_loops(positions):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), MeanOver(), nn.Linear(6, 3)).double().eval()
    x = torch.randn(6, positions, 4).double()
    posterior = fit_laplace(model, loader(x, targets("classification")), structure="kronecker", prior_precision=0.7)
    expected = KroneckerPosterior(kfac_by_loops(model, x), prior_precision=0.7)
    assert posterior.names == expected.names
    for name in posterior.names:
        torch.testing.assert_close(posterior.covariance(name), expected.covariance(name))


def test_kronecker_of_a_single_linear_layer_and_sample_is_exact():
    torch.manual_seed(1)
    model, x = nn.Linear(4, 3).double().eval(), torch.randn(1, 4).double()
    posterior = fit_laplace(model, [(x, torch.tensor([2]))], structure="kronecker", prior_precision=0.7)
    for name in ("weight", "bias"):
        h = dense_ggn(model, x, 1, "classification", [name])
        expected = torch.linalg.inv(h + 0.7 * torch.eye(len(h), dtype=h.dtype))
        torch.testing.assert_close(posterior.covariance(name), expected)


def test_kronecker_of_a_weight_stored_transposed():
    """addmm with [in, out] gives the same posterior as the linear layer with the transposed weight."""
    model, x = make("addmm")
    same = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), MeanOver(), nn.Linear(5, 3)).double().eval()
    values = {
        "0.weight": model.weight.T,
        "0.bias": model.bias,
        "3.weight": model.head.weight,
        "3.bias": model.head.bias,
    }
    same.load_state_dict(values)
    data = loader(x, targets("classification"))
    ours, theirs = (fit_laplace(m, data, structure="kronecker", prior_precision=0.7) for m in (model, same))
    turned = theirs.covariance("0.weight").reshape(5, 4, 5, 4).permute(1, 0, 3, 2).reshape(20, 20)
    torch.testing.assert_close(ours.covariance("weight"), turned)
    torch.testing.assert_close(ours.covariance("bias"), theirs.covariance("0.bias"))
    torch.testing.assert_close(ours.details["log_marginal_likelihood"], theirs.details["log_marginal_likelihood"])


def output_factor(model: nn.Module, x: Tensor, *names: str) -> Tensor:
    """`B` summed over the uses of some parameters."""
    forward = gradients.Forward(model, names)
    output, seen = forward.capture(x)
    p = output.detach().softmax(1)
    one_hot = torch.eye(3, dtype=p.dtype)
    batch = gradients.Batch(forward, x, len(x), output, seen, lambda c: p[:, [c]].sqrt() * (one_hot[c] - p))
    assert len(seen.uses) == 2
    return sum(g.squeeze(1).T @ g.squeeze(1) for column in batch.pull(seen.uses) for g in column)


class TiedCoder(nn.Module):
    """One weight read as [in, out] by the encoder and as [out, in] by the decoder: no Kronecker product for both."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(4, 5)), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(x @ self.weight), self.weight))


def test_kronecker_leaves_out_a_weight_that_is_used_both_ways():
    with pytest.warns(UserWarning, match="not for weight, which stay"):
        posterior = fit_laplace(TiedCoder().eval(), loader(X, targets("classification")), structure="kronecker")
    assert posterior.names == ("head.weight", "head.bias")


def test_kronecker_of_shared_layers_and_weights_counts_every_use_as_a_position():
    model, x = make("shared")
    posterior = fit_laplace(model, loader(x, targets("classification")), structure="kronecker", prior_precision=1.0)
    assert posterior.names == tuple(n for n, _ in model.named_parameters())
    once = torch.tanh(model.twice(x)).detach()
    twice = torch.tanh(model.twice(once)).detach()
    last = torch.tanh(model.first(twice)).detach()
    for name, rows in {"twice.weight": torch.cat([x, once]), "first.weight": torch.cat([twice, last])}.items():
        expected = KroneckerPosterior({"w": (output_factor(model, x, name), rows.T @ rows / len(rows))}, 1.0)
        torch.testing.assert_close(posterior.covariance(name), expected.covariance("w"))


def test_kronecker_refuses_a_parameter_that_is_its_own_input():
    model, x = make("inputless")
    with pytest.warns(UserWarning, match="not for query, square, which stay"):
        fit_laplace(model, loader(x, targets("classification")), structure="kronecker")


def test_kronecker_leaves_other_parameters_deterministic_with_one_warning():
    model, x = make("sequence")
    with pytest.warns(UserWarning, match=r"not for embed\.weight, norm\.weight, norm\.bias, which stay") as caught:
        posterior = fit_laplace(model, loader(x, targets("classification")), structure="kronecker")
    assert len(caught) == 1
    assert posterior.names == ("body.weight", "body.bias", "head.weight", "head.bias")
    with pytest.raises(InputError, match=r"norm\.weight.*structure='diagonal'"):
        fit_laplace(model, loader(x, targets("classification")), structure="kronecker", parameters="norm.*")


def test_kronecker_of_a_time_first_model_equals_batch_first():
    data = loader(TOKENS, targets("classification"))
    found = []
    for name in ("sequence", "time first", "time first, folded"):
        model, _ = make(name)
        found.append(
            fit_laplace(model, data, structure="kronecker", prior_precision=1.0, parameters=["body.*", "head.*"])
        )
    for other in found[1:]:
        torch.testing.assert_close(found[0].to_dense(), other.to_dense())


class Attention(nn.Module):
    """Attention over the rows of a sample, by `nn.MultiheadAttention` or written out with the same parameters."""

    def __init__(self, written_out: bool = False, crossed: bool = False):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.written_out, self.crossed = written_out, crossed

    def forward(self, x):
        layer, keys = self.attention, x.flip(1) if self.crossed else x
        if not self.written_out:
            return self.head(layer(x, keys, keys, need_weights=False)[0].mean(1))
        joined = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in joined.chunk(3, -1))
        values = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(F.linear(values, layer.out_proj.weight, layer.out_proj.bias).mean(1))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_multihead_attention_is_made_of_linear_layers(structure):
    torch.manual_seed(0)
    whole = Attention().double().eval()
    pieces = Attention(written_out=True).double().eval()
    pieces.load_state_dict(whole.state_dict())
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(whole(x), pieces(x))
    data = loader(x, targets("classification"))
    found = [fit_laplace(m, data, structure=structure, prior_precision=1.0) for m in (whole, pieces)]
    assert found[0].names == found[1].names == tuple(n for n, _ in whole.named_parameters())
    torch.testing.assert_close(found[0].to_dense(), found[1].to_dense())


def test_kronecker_of_attention_to_another_sequence():
    """Queries and keys are then made by two parts of one matrix, which has no Kronecker product as a whole."""
    x = torch.randn(6, 5, 4)
    with pytest.warns(UserWarning, match=r"not for attention\.in_proj_weight, attention\.in_proj_bias, which stay"):
        found = fit_laplace(Attention(crossed=True).eval(), loader(x, targets("classification")), structure="kronecker")
    assert found.names == ("attention.out_proj.weight", "attention.out_proj.bias", "head.weight", "head.bias")


def test_kronecker_of_a_grouped_convolution_is_close_in_size():
    """Same trace as the exact curvature up to the product of averages; averaging channels instead would be far off."""
    torch.manual_seed(0)
    model = images(nn.Conv2d(4, 4, 3, groups=4), nn.Tanh()).double().eval()
    x = torch.randn(20, 4, 5, 5).double()
    y = targets("classification", 20)
    kron = fit_laplace(model, [(x, y)], structure="kronecker", prior_precision=1.0, parameters="0.weight")
    exact = fit_laplace(model, [(x, y)], structure="diagonal", prior_precision=1.0, parameters="0.weight")
    h_kron = torch.linalg.inv(kron.to_dense()).trace() - kron.to_dense().shape[0]
    h_exact = (1 / exact.variance("0.weight") - 1).sum()
    assert 0.7 < (h_kron / h_exact).item() < 1.4


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": "same"}, {"groups": 2}]
)
def test_patches_times_weight_is_the_convolution(dims, options):
    torch.manual_seed(0)
    kernel = (2, 3, 1)[:dims]
    convolve = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    groups = options.get("groups", 1)
    x, w = torch.randn(2, 4, *(6, 7, 5)[:dims]), torch.randn(6, 4 // groups, *kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch pads a copy for an even kernel
        expected = convolve(x, w, **options)
    a = patches(x, kernel, options.get("stride", 1), options.get("padding", 0), options.get("dilation", 1), groups)
    out = torch.einsum("ngi,goi->ngo", a, w.reshape(groups, 6 // groups, -1)).reshape(2, -1, 6).transpose(1, 2)
    torch.testing.assert_close(out.reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)


# -- prior precision and noise


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_chosen_hyperparameters_beat_a_grid(structure):
    model, x = make("mlp")
    data = loader(x, targets("regression"))

    def evidence(delta, sigma):
        fixed = fit_laplace(model, data, "regression", structure, prior_precision=delta, noise=sigma)
        return fixed.details["log_marginal_likelihood"]

    free = fit_laplace(model, data, "regression", structure).details
    assert evidence(free["prior_precision"], free["noise"]) == pytest.approx(free["log_marginal_likelihood"])
    factors = [0.1, 0.5, 0.9, 0.999, 1, 1.001, 1.1, 2, 10]
    best = max(evidence(free["prior_precision"] * i, free["noise"] * j) for i in factors for j in factors)
    assert best <= free["log_marginal_likelihood"] + 1e-9
    half = fit_laplace(model, data, "regression", structure, prior_precision=free["prior_precision"]).details
    assert half["noise"] == pytest.approx(free["noise"], rel=1e-3)
    half = fit_laplace(model, data, "regression", structure, noise=free["noise"]).details
    assert half["prior_precision"] == pytest.approx(free["prior_precision"], rel=1e-3)


def test_marginal_likelihood_of_a_linear_model_is_the_exact_one():
    """Bayesian linear regression at its MAP: the Laplace evidence is log N(y; 0, X Xᵀ / δ + σ² I)."""
    torch.manual_seed(0)
    x, y, delta, sigma = torch.randn(20, 3).double(), torch.randn(20, 1).double(), 0.8, 0.5
    model = nn.Linear(3, 1, bias=False).double().eval()
    precision = x.T @ x / sigma**2 + delta * torch.eye(3).double()
    model.weight.data = torch.linalg.solve(precision, x.T @ y / sigma**2).T
    posterior = fit_laplace(model, [(x, y)], "regression", "full", prior_precision=delta, noise=sigma)
    marginal = x @ x.T / delta + sigma**2 * torch.eye(20).double()
    exact = torch.distributions.MultivariateNormal(torch.zeros(20).double(), marginal).log_prob(y[:, 0])
    assert posterior.details["log_marginal_likelihood"] == pytest.approx(exact.item())
    torch.testing.assert_close(posterior.to_dense(), torch.linalg.inv(precision))


def test_evidence_without_a_maximum_warns():
    flat = Evidence(eigenvalues=torch.zeros(3).numpy(), squared_norm=1.0, loss=0.0)
    with pytest.warns(UserWarning, match="give prior_precision="):
        flat.maximise(None, 1.0)


# -- what is chosen, and what comes back


def test_globs_and_frozen_parameters():
    model, x = make("mlp")
    data = loader(x, targets("classification"))
    assert fit_laplace(model, data, parameters="2.*").names == ("2.weight", "2.bias")
    assert fit_laplace(model, data, parameters=["0.bias", "2.w*"]).names == ("0.bias", "2.weight")
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    for structure in ("diagonal", "kronecker", "full"):
        posterior = fit_laplace(model, data, structure=structure, prior_precision=1.0)
        assert posterior.names == ("2.weight",)
        h = dense_ggn(model, x, 6, "classification", ["2.weight"]) + torch.eye(18).double()
        if structure != "kronecker":
            expected = 1 / h.diagonal() if structure == "diagonal" else torch.linalg.inv(h).diagonal()
            torch.testing.assert_close(posterior.variance("2.weight").flatten(), expected)
    with pytest.raises(InputError, match=r"no parameter of the model matches '2\.wieght'; did you mean '2\.weight'"):
        fit_laplace(model, data, parameters="2.wieght")
    with pytest.raises(InputError, match="frozen"):
        fit_laplace(model, data, parameters="0.*")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_dtype_shapes_and_file(structure, dtype, tmp_path):
    model, x = make("mlp")
    model, x = model.to(dtype), x.to(dtype)
    posterior = fit_laplace(model, loader(x, targets("classification")), structure=structure)
    kinds = {"diagonal": DiagonalPosterior, "kronecker": KroneckerPosterior, "full": FullPosterior}
    assert isinstance(posterior, kinds[structure]) and posterior.dtype == dtype
    assert all(posterior.variance(n).shape == p.shape for n, p in model.named_parameters())
    double = fit_laplace(model.double(), loader(x.double(), targets("classification")), structure=structure)
    torch.testing.assert_close(posterior.to_dense().double(), double.to_dense(), rtol=1e-4, atol=1e-5)
    posterior.save(tmp_path / "p.safetensors")
    assert load_posterior(tmp_path / "p.safetensors").details == posterior.details
    assert set(posterior.details) == {"prior_precision", "log_marginal_likelihood"}


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 2)])
def test_regression_output_shapes(shape):
    torch.manual_seed(0)
    outputs = 1 if len(shape) == 1 else shape[1]
    model = nn.Sequential(nn.Linear(4, outputs), *([nn.Flatten(0)] if len(shape) == 1 else [])).eval()
    y = torch.randn(shape)
    posterior = fit_laplace(model, loader(X, y), "regression", "full")
    column = fit_laplace(model[:1], loader(X, y.reshape(6, -1)), "regression", "full")
    torch.testing.assert_close(posterior.to_dense(), column.to_dense())
    assert posterior.details == pytest.approx(column.details)
    if outputs == 1:  # targets may miss, or have in addition, a last dimension of one
        other = fit_laplace(model, loader(X, y.reshape((6,) if len(shape) == 2 else (6, 1))), "regression", "full")
        assert other.details == pytest.approx(posterior.details)


def test_batches_do_not_matter():
    model, x = make("mlp")
    for structure in ("diagonal", "kronecker", "full"):
        found = [fit_laplace(model, loader(x, targets("classification"), k), structure=structure) for k in (1, 4, 6)]
        for other in found[1:]:
            torch.testing.assert_close(other.to_dense(), found[0].to_dense())
    empty = (torch.zeros(0, 4).double(), torch.zeros(0, dtype=torch.long))
    more = fit_laplace(model, [empty, *loader(x, targets("classification"))], structure="full")
    torch.testing.assert_close(more.to_dense(), found[0].to_dense())


@pytest.mark.parametrize("name", ["norms", "custom", "shared", "convolution", "lstm"])
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_model_is_untouched(name, structure):
    model, x = make(name)
    next(model.parameters()).requires_grad_(False)
    for p in list(model.parameters())[1:]:
        p.grad = torch.ones_like(p)
    hook = next(iter(model.children())).register_forward_hook(lambda *_: None)

    def state():
        return (
            {k: v.clone() for k, v in model.state_dict().items()},
            {
                n: (id(p), p.requires_grad, None if p.grad is None else p.grad.clone())
                for n, p in model.named_parameters()
            },
            {
                n: (
                    m.training,
                    len(m._forward_hooks),
                    len(m._forward_pre_hooks),
                    len(m._backward_hooks),
                    sorted(vars(m)),
                )
                for n, m in model.named_modules()
            },
            torch.get_rng_state(),
        )

    pairs, own = TensorDataset(x, targets("classification")), torch.Generator()
    data = DataLoader(pairs, batch_size=4, shuffle=True, generator=own)  # else the loader itself draws global numbers
    before = state()
    with torch.no_grad():
        fit_laplace(model, data, structure=structure)
    after = state()
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    for n in before[1]:
        assert before[1][n][:2] == after[1][n][:2]
        torch.testing.assert_close(before[1][n][2], after[1][n][2], rtol=0, atol=0)
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])
    hook.remove()


@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_works_in_inference_mode(name):
    model, x = make(name)
    with torch.inference_mode():
        posterior = fit_laplace(model, loader(x, targets("classification")), prior_precision=1.0)
    h = dense_ggn(model, x, 6, "classification").diagonal()
    torch.testing.assert_close(posterior.to_dense().diagonal(), 1 / (h + 1))


def test_progress_bar_is_silent_when_asked_or_not_a_terminal(capfd):
    model, x = make("mlp")
    for progress in (True, False):
        fit_laplace(model, loader(x, targets("classification")), progress=progress)
    assert capfd.readouterr() == ("", "")


# -- what cannot be used


class Dropping(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2, dropout=0.1)])
def test_training_mode_is_refused(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3)).train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(InputError, match=r"at '1' is in training mode: call model\.eval\(\)"):
        fit_laplace(model, loader(X, targets("classification")))
    torch.testing.assert_close(model.state_dict(), state)


def test_training_mode_that_does_not_matter_and_dropout_as_a_function():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)).train()
    fit_laplace(model, loader(X, targets("classification")))
    with pytest.raises(InputError, match=r"dropout in training mode; call model\.eval"):
        fit_laplace(Dropping(4, 3).train(), loader(X, targets("classification")))


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("data", "likelihood", "message"),
    [
        ([], "classification", "loader is empty"),
        ([(X, LABELS - 1)], "classification", "labels go from -1 to 1, but the model has classes 0 to 2"),
        ([(X, LABELS + 1)], "classification", "labels go from 1 to 3"),
        ([(X, LABELS[:, None])], "classification", r"labels must be \[B\]"),
        ([(X, LABELS[:4])], "classification", r"labels must be \[B\]"),
        ([(X, LABELS.float())], "classification", "labels must be integers"),
        ([(X, LABELS.float())], "regression", r"targets have shape \(6,\), outputs \(6, 3\)"),
        ([(X, torch.full((6, 3), math.nan))], "regression", "the loss is nan"),
        ([(X * math.inf, LABELS)], "classification", "outputs of the model are not finite"),
        ([X], "classification", r"must yield \(x, y\)"),
        ([{"x": X, "labels": LABELS}], "classification", r"yield \(inputs, labels\)"),
    ],
)
def test_bad_data(data, likelihood, message):
    with pytest.raises(InputError, match=message):
        fit_laplace(nn.Linear(4, 3).eval(), data, likelihood)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "kron"}, "structure is one of diagonal, kronecker, full"),
        ({"likelihood": "probit"}, "likelihood is .classification., .regression.,"),
        ({"likelihood": "poisson", "noise": 0.3}, "poisson has none"),
        ({"prior_precision": 0.0}, "prior_precision is a positive number"),
        ({"prior_precision": "gridsearch"}, "prior_precision is a positive number"),
        ({"noise": 0.3}, "noise= is for likelihood='regression'"),
        ({"likelihood": "regression", "noise": -1.0}, "noise is a positive number"),
        ({"parameters": []}, "empty list"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InputError, match=message):
        fit_laplace(nn.Linear(4, 3).eval(), [(X, LABELS)], **options)


def test_unusable_models():
    with pytest.raises(InputError, match="returns a tuple"):
        fit_laplace(nn.LSTM(4, 3).eval(), [(X, LABELS)])
    with pytest.raises(InputError, match="two logits"):
        fit_laplace(nn.Linear(4, 1).eval(), [(X, LABELS)])
    mixed = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3).double()).eval()
    with pytest.raises(InputError, match="mixed dtypes"):
        fit_laplace(mixed, [(X, LABELS)])


@pytest.mark.parametrize(("outputs", "count"), [(3, 6), (3, 2), (1000, 2)])  # dense, rows, rows of many parameters
def test_what_does_not_fit_is_refused(monkeypatch, outputs, count):
    available = {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 512}
    monkeypatch.setattr(memory.os, "sysconf", available.__getitem__)
    with pytest.raises(InputError, match=r"full covariance over \d+ parameters needs about .* GB.*kronecker"):
        fit_laplace(nn.Linear(4, outputs).eval(), [(X[:count], LABELS[:count])], structure="full")


class Mixing(nn.Linear):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class Shifted(nn.Linear):
    """`shift [4]` belongs to all samples, which only shows if the batch does not have 4 of them."""

    def forward(self, x, shift):
        return super().forward(x * shift)


def test_samples_must_not_depend_on_each_other():
    with pytest.raises(InputError, match="depend on the rest of its batch"):
        fit_laplace(Mixing(4, 3).eval(), [(X, LABELS)])
    data = [({"x": X[:4], "shift": torch.arange(4.0)}, LABELS[:4])]
    with pytest.raises(InputError, match="use another batch size"):
        fit_laplace(Shifted(4, 3).eval(), data)
    fit_laplace(Shifted(4, 3).eval(), [({"x": X, "shift": torch.arange(4.0)}, LABELS)])


class Unused(nn.Module):
    """A parameter without effect, next to an LSTM that torch.vmap refuses."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = Recurrent(), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.body(x)


@pytest.mark.filterwarnings("ignore:torch.vmap cannot run")
def test_a_parameter_without_effect_keeps_its_prior():
    data = loader(torch.randn(6, 2, 4), targets("classification"))
    posterior = fit_laplace(Unused().eval(), data, prior_precision=2.0, parameters="spare")
    torch.testing.assert_close(posterior.variance("spare"), torch.full((2,), 0.5))
    with pytest.warns(UserWarning, match="spare, which stay"):
        fit_laplace(Unused().eval(), data, structure="kronecker", parameters=["spare", "body.head.*"])
