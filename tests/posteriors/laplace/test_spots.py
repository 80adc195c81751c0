"""Norms, embeddings and what is added or multiplied: the fit against a brute-force GGN, without per-sample loops."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import propagauss as pg
from propagauss.posteriors.laplace import gradients

torch.set_num_threads(1)
F64 = torch.float64


class Text(nn.Module):
    """Words, positions that all samples share, a token at the front, a norm, and a tied head if asked."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.words, self.positions = nn.Embedding(7, 3, padding_idx=0), nn.Embedding(5, 3)
        self.front, self.gain = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.rand(3) + 0.5)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 7 if tied else 2)
        if tied:
            self.head.weight = self.words.weight
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
            self.norm.bias.normal_()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        h = self.words(ids) + self.positions(places)
        h = torch.cat([self.front.expand(len(h), -1, -1), h], 1)
        h = self.norm(h) + (self.gain * h).tanh()
        return self.head(h.mean(1))


class Image(nn.Module):
    """Norms over channels, RMS norm, and a table that is added."""

    def __init__(self):
        super().__init__()
        self.conv, self.batch, self.group = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.table, self.rms, self.head = nn.Parameter(torch.randn(1, 4, 2, 2)), nn.RMSNorm(4), nn.Linear(4, 2)
        with torch.no_grad():
            for norm in (self.batch, self.group, self.rms):
                norm.weight.uniform_(0.5, 1.5)
            self.batch.running_mean.normal_()
            self.batch.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.group(self.batch(self.conv(x)).tanh() + self.table)
        return self.head(self.rms(h.mean((2, 3))))


def text() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Text().double().eval(), torch.tensor([[1, 2, 1, 0], [3, 3, 3, 4], [5, 0, 0, 6], [2, 6, 2, 6], [1, 1, 0, 0]])


def tied() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Text(tied=True).double().eval(), text()[1]


def image() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return Image().double().eval(), torch.randn(5, 1, 3, 3, dtype=F64)


cases = pytest.mark.parametrize("case", [text, tied, image])


def brute_force(model: nn.Module, x: Tensor) -> Tensor:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    total = torch.zeros(())
    for i in range(len(x)):
        rows = jacrev(lambda p, i=i: functional_call(model, p, (x[i : i + 1],))[0])(parameters)
        j = torch.cat([rows[n].flatten(1) for n in parameters], 1)
        p = model(x[i : i + 1])[0].softmax(0).detach()
        total = total + j.mT @ (p.diag() - torch.outer(p, p)) @ j
    return total


@cases
@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("batch", [5, 2, 1])
def test_fit_equals_a_brute_force_ggn_without_loops(case, structure, batch, monkeypatch):
    def loop(*args):
        raise AssertionError(f"a loop over samples, for {args[1]}")

    if batch > 1:
        monkeypatch.setattr(gradients, "_one_by_one", loop)
    model, x = case()
    y = torch.zeros(len(x), dtype=torch.long)
    expected = brute_force(model, x)
    expected = expected if structure == "full" else expected.diagonal().diag()
    loader = list(zip(x.split(batch), y.split(batch), strict=True))
    if batch == 2:
        loader = [*loader[:1], (x[2:], y[2:])]  # a batch of one sample has shapes in which all lies by sample
    found = pg.fit_laplace(model, loader, structure=structure, prior_precision=0.7)
    covariance = torch.linalg.inv(expected + 0.7 * torch.eye(len(expected), dtype=F64))
    if case is text:  # behind `front` and `gain`, the first row of `words` is for padding, and is not random
        covariance[6:9] = covariance[:, 6:9] = 0
    torch.testing.assert_close(found.to_dense(), covariance)


def test_where_time_comes_first():
    """Where time comes first, nothing lies by sample, and the loop over samples gives the same."""

    class TimeFirst(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner, self.norm = inner, nn.LayerNorm(3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x.transpose(0, 1))  # [T, B, D]
            return self.inner(h.mean(0))

    torch.manual_seed(0)
    model, x = TimeFirst(nn.Linear(3, 2)).double().eval(), torch.randn(4, 4, 3, dtype=F64)
    found = pg.fit_laplace(model, [(x, torch.zeros(4, dtype=torch.long))], structure="full", prior_precision=0.7)
    precision = brute_force(model, x) + 0.7 * torch.eye(14, dtype=F64)
    names = dict(model.named_parameters())
    assert found.names == tuple(names)
    torch.testing.assert_close(found.to_dense(), torch.linalg.inv(precision))


def test_a_parameter_used_in_two_ways():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.rand(3)), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.layer_norm(x * self.gain, (3,), self.gain) + self.gain.exp())

    torch.manual_seed(0)
    model, x = Twice().double().eval(), torch.randn(5, 3, dtype=F64)
    found = pg.fit_laplace(model, [(x, torch.zeros(5, dtype=torch.long))], structure="full", prior_precision=0.7)
    precision = brute_force(model, x) + 0.7 * torch.eye(11, dtype=F64)
    torch.testing.assert_close(found.to_dense(), torch.linalg.inv(precision))
