"""Embeddings made with `max_norm` are shortened in place whenever they are read: they cannot be random."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg

IDS, LABELS = torch.tensor([[0, 1, 2], [3, 1, 0]]), torch.tensor([0, 1])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2)
        with torch.no_grad():
            self.table.weight.mul_(4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).mean(1))


class Called(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.embedding_bag(ids, self.table.weight, max_norm=1.0))


@pytest.mark.parametrize("kind", [Words, Called])
def test_a_random_table_is_refused_before_it_is_changed(kind: type[Words]) -> None:
    model = kind().eval()
    before = model.table.weight.detach().clone()
    with pytest.raises(pg.InputError, match=r"'table\.weight' cannot be random.*set table\.max_norm = None"):
        pg.fit_laplace(model, [(IDS, LABELS)])
    assert torch.equal(model.table.weight, before)


@pytest.mark.parametrize("engine", [pg.streamline, pg.linearise])
def test_engines_refuse_it_too_and_take_one_that_is_certain(engine) -> None:
    model = Words().eval()
    before = model.table.weight.detach().clone()
    random = {n: torch.ones_like(p) for n, p in model.named_parameters()}
    with pytest.raises(pg.UnsupportedOpError, match=r"at 'table': 'table\.weight' cannot be random.*arange"):
        engine(model, pg.DiagonalPosterior(random), IDS)
    net = engine(model, pg.DiagonalPosterior(random).select("head.*"), IDS)
    mean = net(IDS).mean
    assert torch.equal(model.table.weight, before)
    torch.testing.assert_close(mean, model(IDS))


def test_what_the_message_says_works() -> None:
    model = Words().eval()
    expected = model(IDS)
    model.table(torch.arange(model.table.num_embeddings))
    model.table.max_norm = None
    posterior = pg.fit_laplace(model, [(IDS, LABELS)])
    net = pg.linearise(model, posterior, IDS)
    torch.testing.assert_close(net(IDS).mean, expected)
    assert net(IDS).variance.min() > 0
