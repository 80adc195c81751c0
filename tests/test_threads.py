"""Several threads at once: each gets what it would get alone, and nothing of the process is changed."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg

THREADS = 4
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 1, 0])


def mlp(inplace: bool = False) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace), nn.Linear(4, 2)).eval()


def diagonal(model: nn.Module) -> pg.DiagonalPosterior:
    return pg.DiagonalPosterior({n: torch.ones_like(p) for n, p in model.named_parameters()})


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What the functions return when they run in threads of their own; the first error if there is one."""
    found: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            found[i] = works[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
    return found


@pytest.fixture(autouse=True)
def nothing_of_the_process_changes() -> Iterator[None]:
    def state() -> Any:
        calls = nn.Module.__call__, nn.Module.__getattr__, F.has_torch_function  # type: ignore[attr-defined]
        return list(warnings.filters), warnings.showwarning, logging.getLogger("torch").level, calls

    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize("shared", [False, True], ids=["models of their own", "the same model"])
@pytest.mark.parametrize("engine", [pg.streamline, pg.linearise], ids=lambda f: f.__name__)
def test_both_engines_from_several_threads(engine: Any, shared: bool) -> None:
    models = [mlp()] * THREADS if shared else [mlp() for _ in range(THREADS)]
    posteriors = [diagonal(m) for m in models]  # here: a thread may not read parameters while another traces
    alone = [engine(m, p, X)(X) for m, p in zip(models, posteriors, strict=True)]

    def work(i: int) -> None:
        for _ in range(3):
            found = engine(models[i], posteriors[i], X)(X)
            torch.testing.assert_close((found.mean, found.variance), (alone[i].mean, alone[i].variance))
            torch.testing.assert_close(models[i](X), found.mean)

    at_once(*(lambda i=i: work(i) for i in range(THREADS)))


def test_predictions_while_another_thread_traces() -> None:
    """With the net, with the very model that is traced, and with a model of its own."""
    model, other = mlp(), mlp()
    posterior = diagonal(model)
    classifier = pg.Classifier(pg.streamline(model, posterior, X))
    expected = classifier(X).probs, model(X), other(X)
    done = threading.Event()

    def trace() -> None:
        try:
            for _ in range(5):
                pg.streamline(model, posterior, X)
        finally:
            done.set()

    def predict() -> int:
        calls = 0
        while not done.is_set():
            torch.testing.assert_close((classifier(X).probs, model(X), other(X)), expected)
            calls += 1
            time.sleep(0.001)
        return calls

    assert at_once(trace, predict)[1] > 0
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_other_threads_keep_their_warnings() -> None:
    """A warning of this thread is not lost for good because another thread traces."""
    at_once(*(lambda: pg.streamline((m := mlp()), diagonal(m), X) for _ in range(THREADS)))
    with pytest.warns(UserWarning, match="still heard"):
        warnings.warn("still heard", UserWarning, stacklevel=1)


# -- fits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_model_that_several_threads_fit(structure: Any) -> None:
    model = Attention().eval()
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(1))
    before = dict(model.named_parameters())

    def fit() -> Tensor:
        return pg.fit_laplace(model, [(x, Y)] * 3, structure=structure, parameters="*weight").to_dense()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = fit()
        found = at_once(*[fit] * THREADS)
    for each in found:
        torch.testing.assert_close(each, alone)
    assert all(p is before[n] for n, p in model.named_parameters())


def test_a_fit_does_not_rewind_what_others_draw() -> None:
    """The draws of the loader stand for those of another thread while the fit runs."""

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(3):
            torch.rand(5)
            yield X, Y

    state = torch.get_rng_state()
    for _ in range(3):
        torch.rand(5)
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    at_once(lambda: pg.fit_laplace(mlp_of_a_seed(), loader()))
    assert torch.equal(torch.get_rng_state(), expected)


def mlp_of_a_seed() -> nn.Module:
    """Without a draw from the global numbers."""
    model = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.ReLU(), nn.Linear(4, 2, device="meta"))
    generator = torch.Generator().manual_seed(2)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("engine", [pg.streamline, pg.linearise], ids=lambda f: f.__name__)
def test_engines_draw_nothing(engine: Any) -> None:
    model = mlp_of_a_seed()
    state = torch.get_rng_state()
    engine(model, diagonal(model), X)
    assert torch.equal(torch.get_rng_state(), state)


# -- files


def test_a_file_that_several_threads_save(tmp_path: Path) -> None:
    posterior, path = diagonal(mlp()), tmp_path / "p.safetensors"
    at_once(*(lambda: [posterior.save(path) for _ in range(20)] for _ in range(THREADS)))
    assert pg.load_posterior(path).names == posterior.names
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_exports_from_two_threads(tmp_path: Path) -> None:
    classifiers = [pg.Classifier(pg.streamline(m, diagonal(m), X)) for m in (mlp(), mlp())]
    at_once(*(lambda i=i: classifiers[i].export(tmp_path / f"{i}.pt2") for i in (0, 1)))
    for i, classifier in enumerate(classifiers):
        program = torch.export.load(tmp_path / f"{i}.pt2").module()
        torch.testing.assert_close(program(X)["probabilities"], classifier(X).probs)
