"""Kronecker factors of fit_laplace against sums written out as loops."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posteriors.laplace.models import TOKENS, X, dense_ggn, images, loader, make, targets
from propagauss.errors import InputError
from propagauss.posteriors import KroneckerPosterior, fit_laplace
from propagauss.posteriors.laplace import gradients
from propagauss.posteriors.laplace.capture import patches


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
