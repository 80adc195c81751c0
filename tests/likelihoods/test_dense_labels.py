"""Classes at many positions: tokens `[B, T, C]` and images `[B, C, H, W]`, with labels that are skipped."""

import math
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import propagauss as pg
from propagauss.likelihoods import CategoricalLikelihood
from propagauss.likelihoods.links import mean_field
from propagauss.metrics import accuracy, nlpd
from propagauss.predict import predict

torch.set_num_threads(1)
F64 = torch.float64


class Tokens(nn.Module):
    """`[B, T, C]`, in which positions depend on each other."""

    def __init__(self, classes: int = 3):
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(h + h.mean(1, keepdim=True))


def tokens() -> tuple[nn.Module, Tensor, Tensor, int]:
    torch.manual_seed(0)
    y = torch.randint(0, 3, (5, 4))
    y[0, 1] = y[2, :] = y[4, 3] = -100
    return Tokens().double().eval(), torch.randn(5, 4, 2, dtype=F64), y, 2


def images() -> tuple[nn.Module, Tensor, Tensor, int]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 1)).double().eval()
    y = torch.randint(0, 4, (3, 2, 3))
    y[0, 0, 0] = y[1, 1] = -100
    return model, torch.randn(3, 2, 2, 3, dtype=F64), y, 1


cases = pytest.mark.parametrize("case", [tokens, images])


def ggn(model: nn.Module, x: Tensor, y: Tensor, dim: int) -> Tensor:
    """Sample by sample and position by position."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    total: Tensor | float = 0.0
    for i in range(len(x)):
        jacobian = jacrev(lambda p, i=i: functional_call(model, p, (x[i : i + 1],)).movedim(dim, -1)[0])(parameters)
        rows = torch.cat([jacobian[n].flatten(y.dim()) for n in parameters], -1)  # [*positions, C, P]
        p = model(x[i : i + 1]).movedim(dim, -1)[0].softmax(-1).detach()
        for where in (y[i] != -100).nonzero().tolist():
            at = tuple(where)
            hessian = p[at].diag() - torch.outer(p[at], p[at])
            total = total + rows[at].mT @ hessian @ rows[at]
    assert isinstance(total, Tensor)
    return total


@cases
@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_fit_equals_a_brute_force_ggn(case, structure):
    model, x, y, dim = case()
    expected = ggn(model, x, y, dim)
    expected = expected if structure == "full" else expected.diagonal().diag()
    precision = expected + 0.7 * torch.eye(len(expected), dtype=F64)
    found = pg.fit_laplace(model, [(x[:2], y[:2]), (x[2:], y[2:])], structure=structure, prior_precision=0.7)
    torch.testing.assert_close(found.to_dense(), torch.linalg.inv(precision))
    loss = F.cross_entropy(model(x).movedim(dim, 1), y, reduction="sum").item()
    squares = sum(p.square().sum().item() for p in model.parameters())
    evidence = -loss - 0.35 * squares - 0.5 * torch.logdet(precision).item() + 0.5 * len(expected) * math.log(0.7)
    assert found.details["log_marginal_likelihood"] == pytest.approx(evidence)


@cases
def test_kronecker_factors_are_sums_over_rows(case):
    """`B = Σ g gᵀ` and `A = mean a aᵀ` of the last layer, whose gradients are the columns of the root themselves."""
    model, x, y, dim = case()
    last = list(model.children())[-1]
    inputs: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    p = model(x).movedim(dim, -1).softmax(-1).detach().reshape(-1, model(x).shape[dim])
    handle.remove()
    a = inputs[0].movedim(dim, -1).reshape(len(p), -1)
    counted = (y != -100).flatten()
    b = sum(row.diag() - torch.outer(row, row) for row in p[counted])
    h = torch.kron(b, a.mT @ a / len(a))
    name = next(n for n, q in model.named_parameters() if q is last.weight)
    found = pg.fit_laplace(model, [(x, y)], structure="kronecker", prior_precision=0.7).select(name)
    expected = torch.linalg.inv(h + 0.7 * torch.eye(len(h), dtype=F64))
    torch.testing.assert_close(found.to_dense(), expected)


def test_one_position_is_the_plain_case():
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4).double().eval(), torch.randn(6, 3, dtype=F64), torch.randint(0, 4, (6,))
    plain = pg.fit_laplace(model, [(x, y)], structure="full")
    token = pg.fit_laplace(model, [(x.unsqueeze(1), y.unsqueeze(1))], structure="full")
    torch.testing.assert_close(token.to_dense(), plain.to_dense())


def test_which_dimension_must_be_clear():
    model = nn.Linear(2, 4).double().eval()
    x, y = torch.randn(3, 4, 2, dtype=F64), torch.randint(0, 4, (3, 4))
    with pytest.raises(pg.InputError, match=r"which is the dimension of the classes.*class_dim"):
        pg.fit_laplace(model, [(x, y)])
    last = pg.fit_laplace(model, [(x, y)], CategoricalLikelihood(class_dim=-1), "full", prior_precision=1.0)
    torch.testing.assert_close(last.to_dense(), torch.linalg.inv(ggn(model, x, y, 2) + torch.eye(12, dtype=F64)))
    with pytest.raises(pg.InputError, match=r"the shape of the outputs without the dimension.*class_dim"):
        pg.fit_laplace(model, [(x, y[:, :2])])
    with pytest.raises(pg.InputError, match="class_dim is 0"):
        CategoricalLikelihood(class_dim=0)


def test_labels_out_of_range_are_refused_and_skipped_ones_are_not():
    model, x, y, _ = tokens()
    pg.fit_laplace(model, [(x, torch.full_like(y, -100)), (x, y)], prior_precision=1.0)
    with pytest.raises(pg.InputError, match="labels go from -1 to"):
        pg.fit_laplace(model, [(x, y.where(y >= 0, -1))])
    other = CategoricalLikelihood(ignore_index=-1)
    found = pg.fit_laplace(model, [(x, y.where(y >= 0, -1))], other, prior_precision=1.0)
    expected = pg.fit_laplace(model, [(x, y)], prior_precision=1.0)
    torch.testing.assert_close(found.to_dense(), expected.to_dense())


# -- the prediction


def posterior_of(model: nn.Module) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, 0.05) for n, p in model.named_parameters()})


@cases
@pytest.mark.parametrize("covariance", ["diagonal", "full"])
def test_probabilities_have_the_classes_last(case, covariance):
    model, x, y, dim = case()
    net = pg.linearise(model, posterior_of(model), x[:2], covariance=covariance)
    classifier = pg.Classifier(net, "mean_field", class_dim=None if dim == 2 else 1)
    probs = classifier(x).probs
    assert probs.shape == (*y.shape, model(x).shape[dim])
    latent = net(x)
    flat = torch.arange(latent.mean[0].numel()).reshape(latent.shape[1:]).movedim(dim - 1, -1)
    for i, *where in [(0, *(0 for _ in y.shape[1:])), (2, *(n - 1 for n in y.shape[1:]))]:
        index = flat[tuple(where)]
        mean = latent.mean[i].flatten()[index]
        block = latent.covariance[i][index][:, index]
        block = block if covariance == "full" else block.diagonal()
        torch.testing.assert_close(probs[(i, *where)], mean_field(mean, block).exp())
    parts = classifier.decompose(x)
    torch.testing.assert_close(parts.total, classifier(x).entropy())
    assert (parts.epistemic > 0).all()


def test_with_four_dimensions_it_asks():
    model, x, _, _ = images()
    net = pg.streamline(model, posterior_of(model), x[:2])
    with pytest.raises(pg.InputError, match=r"say which dimension .* class_dim=1 for \[B, C, H, W\]"):
        pg.Classifier(net)(x)
    assert pg.Classifier(net, class_dim=-3)(x).probs.shape == (3, 2, 3, 4)
    with pytest.raises(pg.InputError, match="dimension 7"):
        pg.Classifier(net, class_dim=7)(x)


@cases
def test_the_scale_skips_labels(case):
    model, x, y, dim = case()
    net = pg.streamline(model, posterior_of(model), x[:2])
    classifier = pg.Classifier(net, class_dim=None if dim == 2 else 1)
    counted = y != -100
    expected = -classifier(x).log_prob(y.clamp(min=0))[counted].mean().item()
    classifier.fit_scale([(x[:2], y[:2]), (x[2:], y[2:])], progress=False)
    report = classifier.fit_report
    assert report is not None and report.points == int(counted.sum())
    assert report.nlpd_before == pytest.approx(expected)
    assert nlpd(classifier(x), y) == pytest.approx(report.nlpd_after)
    right = (classifier(x).probs.argmax(-1) == y)[counted]
    assert accuracy(classifier(x), y) == pytest.approx(right.double().mean().item())


@cases
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_exported_and_streamed(case, ending, tmp_path):
    model, x, y, dim = case()
    model, x = model.float(), x.float()
    net = pg.streamline(model, posterior_of(model), x[:2])
    classifier = pg.Classifier(net, "mean_field", class_dim=None if dim == 2 else 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = classifier.export(tmp_path / f"c.{ending}")
    np.save(tmp_path / "x.npy", x.numpy())
    predict(path, tmp_path / "x.npy", tmp_path / "out.parquet", progress=False)
    table, probs = pq.read_table(tmp_path / "out.parquet"), classifier(x).probs.detach()
    columns = [name for name in table.column_names if name.startswith("prediction")]
    found = torch.tensor(np.stack([table[name].to_numpy() for name in columns], 1))
    assert torch.equal(found.reshape(y.shape).long(), probs.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_labels_of_any_integers(dtype: torch.dtype) -> None:
    """156 is a class, though it is -100 in eight bits."""
    labels = torch.tensor([0, 156, 199], dtype=torch.int64)
    found = CategoricalLikelihood().targets(labels.to(dtype), torch.Size([3, 200]))
    assert torch.equal(found, labels)
