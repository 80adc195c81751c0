"""A posterior remembers the weights that it was fitted on, through files and changes of its own."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import propagauss as pg
from propagauss.posteriors.fingerprint import differing, fingerprint

torch.manual_seed(0)
X, Y = torch.randn(20, 3), torch.randint(0, 2, (20,))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def fitted(structure: Any = "diagonal") -> pg.Posterior:
    return pg.fit_laplace(model(), [(X, Y)], structure=structure, progress=False)


@functools.cache
def same_and_other() -> tuple[nn.Module, nn.Module]:
    """The model, and one with another weight, for tests that leave both as they are."""
    same, other = model(), model()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    return same, other


ENGINES = [pg.streamline, pg.linearise]
CHANGES: dict[str, Callable[[pg.Posterior], pg.Posterior]] = {
    "as it is": lambda p: p,
    "selected": lambda p: p.select("2.*"),
    "scaled": lambda p: p.scale(0.5),
    "moved": lambda p: p.to(torch.float32),
    "bound": lambda p: p.bind(dict(model().named_parameters())),
}


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_other_weights_are_noticed(structure: str, change: str, tmp_path: Path) -> None:
    CHANGES[change](fitted(structure)).save(tmp_path / "p.safetensors")
    posterior = pg.load_posterior(tmp_path / "p.safetensors")
    same, other = same_and_other()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in ENGINES:
            engine(same, posterior, X[:2])
    for engine in ENGINES:
        with pytest.warns(UserWarning, match=r"fitted on other weights: '0\.weight' of the model have changed") as told:
            engine(other, posterior, X[:2])
        assert told[0].filename == __file__


def test_double_precision_is_no_other_model() -> None:
    posterior, wide = fitted().to(torch.float64), model().double()
    assert differing(posterior.fitted_on, dict(wide.named_parameters())) == []
    with torch.no_grad():
        wide[2].bias += 1e-3
    assert differing(posterior.fitted_on, dict(wide.named_parameters())) == ["2.bias"]


def test_fewer_bits_are_not_compared() -> None:
    half = model().to(torch.bfloat16)
    assert fingerprint(dict(half.named_parameters())) == {}
    assert differing(fitted().fitted_on, dict(half.named_parameters())) == []


def test_a_posterior_of_ones_own_knows_no_weights() -> None:
    posterior = pg.DiagonalPosterior({"2.bias": torch.ones(2)})
    assert not posterior.fitted_on
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pg.streamline(model(), posterior, X[:2])


def test_many_changes_are_counted() -> None:
    with pytest.warns(UserWarning, match=r"'0\.weight', '0\.bias', '2\.weight' and 1 more of the model"):
        other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
        pg.streamline(other, fitted(), X[:2])


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> pg.Posterior:
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    meta = json.loads(header["meta"])
    change(meta)
    save_file(tensors, path, metadata=header | {"meta": json.dumps(meta)})
    return pg.load_posterior(path)


def test_files_of_earlier_versions_load(tmp_path: Path) -> None:
    fitted().save(tmp_path / "p.safetensors")
    found = rewritten(tmp_path / "p.safetensors", lambda meta: meta.pop("fitted_on"))
    assert not found.fitted_on and found.names == fitted().names


@pytest.mark.parametrize("value", [3, [], {"a": 1}, {"a": "x" * 1000}, None])
def test_malformed_fingerprints_are_refused(value: Any, tmp_path: Path) -> None:
    fitted().save(tmp_path / "p.safetensors")
    with pytest.raises(pg.PosteriorError, match="checksums of weights by name"):
        rewritten(tmp_path / "p.safetensors", lambda meta: meta.update(fitted_on=value))
