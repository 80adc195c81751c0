"""Derivatives that are taken automatically, in files: written out as ops, with an open batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import propagauss as pg
from both_files import both_files
from propagauss.baselines import GLM
from propagauss.passes.backwards import written_out as pass_
from propagauss.predict.models.loading import load


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], **layers: nn.Module):
        super().__init__()
        self.function, self.layers, self.first = function, nn.ModuleDict(layers), nn.Conv2d(2, 4, 3, padding=1)
        self.head = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        parts = [self.function(h), *(layer(h) for layer in self.layers.values())]
        return self.head(torch.cat([p.flatten(1) for p in parts], 1))


def many(h: Tensor) -> Tensor:
    """As they are, and with rows in the batch; of one result and of several; of other sizes."""
    parts = h.amax(1), h.cumsum(-1), h.sort(-1).values, F.pad(h, (1, 0, 1, 1), mode="reflect"), F.glu(h, 1)
    return torch.cat([p.flatten(1) for p in parts], 1)


def uneven(h: Tensor) -> Tensor:
    """Adjoints that are written down, but not for windows of several sizes."""
    return torch.cat([F.adaptive_avg_pool2d(h, 3).flatten(1), F.avg_pool2d(h, 3, ceil_mode=True).flatten(1)], 1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "many": lambda: Model(many),
    "uneven": lambda: Model(uneven),
    "layers": lambda: Model(
        lambda h: F.normalize(h, dim=1),
        transposed=nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        groups=nn.GroupNorm(2, 4),
        bent=nn.PReLU(4),
        normed=weight_norm(nn.Conv2d(4, 3, 2)),
    ),
}


def linearised(name: str) -> tuple[nn.Module, pg.DiagonalPosterior, pg.Streamlined, Tensor]:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(5, 2, 5, 5)
    model(x)
    posterior = pg.DiagonalPosterior({n: 1e-3 + 1e-3 * torch.rand_like(p) for n, p in model.named_parameters()})
    return model, posterior, pg.linearise(model.eval(), posterior, x[:2]), x


@pytest.mark.parametrize("name", [n for n in MODELS if n != "uneven"])  # ONNX has no such windows
def test_files_are_right_for_any_batch(name: str, tmp_path: Path) -> None:
    model, posterior, net, x = linearised(name)
    expected = GLM(model, posterior)(x)
    torch.testing.assert_close(net(x).variance, expected.variance, rtol=1e-4, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        files = both_files(pg.Regressor(net, noise=0.1), tmp_path)
    for path in files.values():
        written = load(path)
        assert written.batch is None
        found = torch.as_tensor(written(x.numpy())["variance"])
        torch.testing.assert_close(found, expected.variance + 0.1**2, rtol=1e-4, atol=0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    *_, net, x = linearised("uneven")
    classifier = pg.Classifier(net)
    again = pg.load(classifier.save(tmp_path / "p.pt2"))
    torch.testing.assert_close(again(x).probs, classifier(x).probs)
    assert "written_out" not in net.code  # the network itself stays as it was


def test_what_cannot_be_written_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_, "_traced", lambda *_: None)
    *_, net, _ = linearised("many")
    with pytest.raises(pg.PropagaussError, match=r"derivative of .*sort.* is taken automatically"):
        pg.Classifier(net).save(tmp_path / "p.pt2")
    assert not list(tmp_path.iterdir())
