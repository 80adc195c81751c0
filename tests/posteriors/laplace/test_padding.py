"""Rows of embeddings that stand for padding: training leaves them as they are, so a fitted posterior does too."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

import propagauss as pg

F64 = torch.float64


class Words(nn.Module):
    """A mean over all tokens, padding among them; the head may share the table."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 3, padding_idx=2), nn.Linear(3, 6 if tied else 2)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1).tanh())


class Called(Words):
    """The row is named in the call, and by no module."""

    def __init__(self) -> None:
        super().__init__()
        self.table.padding_idx = None

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding(ids, self.table.weight, padding_idx=-4).mean(1).tanh())


class Bag(Called):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding_bag(ids, self.table.weight, padding_idx=2).tanh())


class Single(Called):
    """One token of each text, as a lookup of `[B]`."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding(ids[:, 0], self.table.weight, 2).tanh())


def words(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Words(tied).to(F64).eval()


def texts(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(6, (count, 4), generator=generator), torch.randint(2, (count,), generator=generator)


def jacobians(model: nn.Module, ids: Tensor) -> Tensor:
    """`[B, outputs, P]` by automatic differentiation, which gives rows of padding no derivative."""
    means = {n: p.detach() for n, p in model.named_parameters()}
    rows = jacrev(lambda p: functional_call(model, p, (ids,)))(means)
    return torch.cat([rows[n].flatten(2) for n in means], -1)


# few texts leave the curvature as its rows, many as a matrix
@pytest.mark.parametrize("count", [4, 60])
@pytest.mark.parametrize("structure, per_layer", [("diagonal", False), ("full", False), ("full", True)])
def test_padding_is_not_random(structure: str, per_layer: bool, count: int) -> None:
    model = words()
    options = {"per_layer": True} if per_layer else {"prior_precision": 0.7}
    posterior = pg.fit_laplace(model, [texts(count)], structure=structure, **options)  # type: ignore[arg-type]
    variance = posterior.variance("table.weight")
    assert (variance[2] == 0).all() and (variance[[0, 1, 3, 4, 5]] > 0).all()
    covariance = posterior.to_dense()
    assert (covariance[6:9] == 0).all() and (covariance[:, 6:9] == 0).all()  # the row in the flattened table

    # nothing else changes: no derivative reached the row, so what it had was the prior's variance alone
    ids = torch.tensor([[0, 1, 2, 2], [2, 2, 2, 2], [3, 4, 5, 1]])
    j = jacobians(model, ids)
    found = pg.linearise(model, posterior, ids)(ids).covariance
    torch.testing.assert_close(found, j @ covariance @ j.mT)
    if not per_layer:
        seen, p = jacobians(model, texts(count)[0]), model(texts(count)[0]).softmax(-1).detach()
        h = (seen.mT @ (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)) @ seen).sum(0)
        h = h if structure == "full" else h.diagonal().diag()
        torch.testing.assert_close(found, j @ torch.linalg.inv(h + 0.7 * torch.eye(len(h), dtype=F64)) @ j.mT)


@pytest.mark.parametrize("structure", ["diagonal", "full"])
@pytest.mark.parametrize("kind", [Called, Bag, Single])
def test_a_row_that_only_the_call_names_is_not_random(kind: type[Called], structure: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a row says nothing about the table
        posterior = pg.fit_laplace(kind().to(F64).eval(), [texts(20)], structure=structure, prior_precision=0.7)  # type: ignore[arg-type]
    variance = posterior.variance("table.weight")
    assert (variance[2] == 0).all() and (variance[[0, 1, 3, 4, 5]] > 0).all()


def test_draws_leave_it_as_it_is() -> None:
    posterior = pg.fit_laplace(words(), [texts(20)], structure="full", prior_precision=0.7)
    assert (posterior.sample(5)["table.weight"][:, 2].abs() < 1e-12).all()


@pytest.mark.parametrize("structure", ["diagonal", "full"])
def test_a_row_that_the_head_learns_is_random(structure: str) -> None:
    posterior = pg.fit_laplace(words(tied=True), [texts(20)], structure=structure, prior_precision=0.7)  # type: ignore[arg-type]
    assert (posterior.variance("table.weight") > 0).all()
