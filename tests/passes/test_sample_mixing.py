"""Samples of a batch that an op moves or mixes: a joint covariance per sample cannot follow them."""

import inspect
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import propagauss as pg
from engines.test_bad_input import Call, X, diagonal, refuse
from propagauss.passes.sample_mixing import Values
from propagauss.tracing.trace import trace

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t(),
    "sum over the batch": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "centred": lambda x: x - x.mean(0, keepdim=True),
    "products of samples": lambda x: x @ x.t(),
    "softmax over the batch": lambda x: x.softmax(0),
    "cumulative": lambda x: x.cumsum(0),
    "reversed": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "added to the first": lambda x: torch.zeros_like(x).index_add(0, torch.zeros(len(x), dtype=torch.long), x),
    "only in the middle": lambda x: torch.cat([x[:1], x[1:2] + x[2:3], x[2:]]),
    "only the halves": lambda x: x + torch.cat([x[2:], x[:2]]),
    "added to the last": lambda x: torch.zeros_like(x).scatter_add(0, torch.full_like(x, len(x) - 1).long(), x),
    "Fourier transform over the batch": lambda x: torch.fft.fft(x, dim=0).real,
    "orthogonal factor": lambda x: torch.linalg.qr(x)[0],
}


@pytest.mark.parametrize("name", MOVES)
def test_full_covariance_of_a_moved_or_mixed_batch(name: str) -> None:
    """The remedies differ: what is moved only can be moved back, and the other structure is right for it."""
    message = refuse(Call(MOVES[name]), "batch", error=pg.UnsupportedOpError, covariance="full")
    assert "covariance='diagonal'" in message and "body" in message
    assert ("has no such limit" if name == "transpose" else "treat samples one by one") in message


@pytest.mark.parametrize("name", MOVES)
def test_diagonal_covariance_of_a_moved_or_mixed_batch(name: str) -> None:
    """Samples count as independent there, which the weights that they share make wrong: it is said."""
    model = Call(MOVES[name])
    if name == "transpose":  # moved as a whole
        net = pg.streamline(model, diagonal(model), X)
    else:
        with pytest.warns(UserWarning, match="samples of a batch depend on each other, by aten"):
            net = pg.streamline(model, diagonal(model), X)
        assert "samples of the batch, which share the weights, count as independent" in str(net.plan)
    g = net(X)
    torch.testing.assert_close(g.mean, model(X).detach())
    assert (g.variance >= 0).all() and g.variance.max() > 0


KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over entries": lambda x: x.softmax(1),
    "sum over entries": lambda x: x.sum(1),
    "products within a sample": lambda x: x[:, :, None] @ x[:, None],
    "reversed entries": lambda x: x.flip(1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_keeps_samples_apart_has_a_joint_covariance(name: str) -> None:
    model = Call(KEPT[name]).double()
    x = X.double()
    g = pg.streamline(model, diagonal(model).scale(1e-8), x, covariance="full")(x)
    named = {n: p.detach() for n, p in model.named_parameters()}
    jacobians = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)).reshape(len(x), -1))(named)
    expected = sum(1e-8 * j.flatten(2) @ j.flatten(2).mT for j in jacobians.values())
    torch.testing.assert_close(g.covariance, expected, rtol=1e-5, atol=1e-14)


def test_samples_that_meet_before_anything_is_random() -> None:
    """What is certain may depend on the whole batch; an example of one sample is enough to see it where it may not."""

    class Centred(torch.nn.Module):
        def __init__(self, after: bool):
            super().__init__()
            self.layer, self.after = torch.nn.Linear(3, 2), after

        def forward(self, x: Tensor) -> Tensor:
            return (h := self.layer(x)) - h.mean(0) if self.after else self.layer(x - x.mean(0))

    before, after = Centred(after=False).eval(), Centred(after=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        g = pg.streamline(before, diagonal(before), X)(X)
        torch.testing.assert_close(g.mean, before(X).detach())
    with pytest.warns(UserWarning, match="samples of a batch depend on each other"):
        pg.streamline(after, diagonal(after), X[:1])


def test_only_the_ops_where_samples_meet_are_named() -> None:
    """What hands on values that are mixed already is not to blame."""
    model = Call(lambda x: (x.cumsum(0).flip(0) * 2).softmax(1))
    with pytest.warns(UserWarning, match=r"by aten.cumsum at '\(model\)': they share"):
        pg.streamline(model, diagonal(model), X)


@pytest.mark.parametrize("engine", [pg.streamline, pg.linearise], ids=lambda f: f.__name__)
def test_any_two_samples_that_meet_are_found(engine: Callable[..., torch.nn.Module]) -> None:
    """Not the first and the last only, also in a batch of a fixed size."""
    batch = 9
    x = torch.randn(batch, 3)
    for i, j in [(0, 8), (3, 4), (4, 3), (2, 6), (7, 1)]:
        shared = torch.zeros(batch, batch).fill_diagonal_(1.0)
        shared[i, j] = 0.5
        model = Call(lambda h, shared=shared: shared @ h)
        if engine is pg.linearise:
            with pytest.raises(pg.UnsupportedOpError, match="depends on the others"):
                engine(model, diagonal(model), x)
        else:
            with pytest.warns(UserWarning, match="samples of a batch depend on each other"):
                engine(model, diagonal(model), x)


@pytest.mark.parametrize("shift", [1, 6, 8])
def test_a_shift_is_found_in_a_batch_of_any_size(shift: int) -> None:
    """Few samples are looked at first, which may be as many as it shifts by."""
    model, x = Call(lambda h: h.roll(shift, 0)), torch.randn(16, 3)
    with pytest.raises(pg.UnsupportedOpError, match="depends on the others"):
        pg.linearise(model, diagonal(model), x)
    with pytest.raises(pg.InputError, match="depend on the rest of its batch"):
        pg.fit_laplace(model, [(x, torch.zeros(16, 3))], likelihood="regression", progress=False)


def test_values_of_a_deep_model() -> None:
    """Without a call within a call for every op."""

    class Deep(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            for _ in range(600):
                h = h + 1
            return h - h.mean(0)

    model = Deep(3, 3).eval()
    traced = trace(model, X)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 200)
    try:
        found = Values(traced, flipped=False)[traced.outputs[0]]
    finally:
        sys.setrecursionlimit(limit)
    torch.testing.assert_close(found, model(X).detach())


def test_parts_of_a_list_keep_samples_apart() -> None:
    """Tensors that an op broadcasts come as a list."""
    model = Call(lambda x: torch.nn.functional.smooth_l1_loss(x, x.flip(1), reduction="none"))
    assert pg.streamline(model, diagonal(model), X, covariance="full")(X).variance.isfinite().all()
