"""What the calls are made with."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import propagauss as pg
from arguments.given import PROBS, X, mlp
from propagauss import baselines, tasks


@pytest.fixture(scope="module")
def t(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    model = mlp()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    net = pg.streamline(model, posterior, X)
    folder = tmp_path_factory.mktemp("files")
    (folder / "folder.pt2").mkdir()
    (folder / "junk.safetensors").write_bytes(b"junk")
    return SimpleNamespace(
        model=model,
        posterior=posterior,
        net=net,
        uncertain=pg.streamline(model, None, pg.Gaussian(X, X.square())),
        classifier=pg.Classifier(net),
        regressor=pg.Regressor(net, noise=0.1),
        montecarlo=baselines.MonteCarlo(model, posterior, samples=3),
        glm=baselines.GLM(model, posterior),
        snapshots=[{n: p.detach() + i for n, p in model.named_parameters()} for i in (-1, 0, 1)],
        scores=tasks.ood.from_probs(PROBS),
        folder=folder,
    )
