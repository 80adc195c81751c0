"""fit_laplace against explicit Jacobians in float64: exact structures, what is chosen, and what comes back."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from posteriors.cases import Largest
from posteriors.laplace.models import CASES, X, dense_ggn, loader, make, targets
from propagauss.errors import InputError
from propagauss.posteriors import DiagonalPosterior, FullPosterior, KroneckerPosterior, fit_laplace, load_posterior
from propagauss.posteriors.laplace import gradients, kfac

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
