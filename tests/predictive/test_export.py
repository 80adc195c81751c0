"""Predictors outside Python: what the exported files return equals what the predictor returns."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from network.test_compile import gpt, resnet, vit
from propagauss.rules.elementwise.activation import CLOSED
from propagauss.rules.elementwise.slopes import TANGENTS

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")


def posterior(model: nn.Module, variance: float = 1e-2) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


def mlp(outputs: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)).eval(), torch.randn(5, 6)


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return nn.Sequential(*layers).eval(), torch.randn(5, 1, 8, 8)


def run_onnx(path: Path, *inputs: Tensor) -> dict[str, Tensor]:
    session = ort.InferenceSession(str(path))
    names = [i.name for i in session.get_inputs()]
    found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    return {o.name: torch.from_numpy(v) for o, v in zip(session.get_outputs(), found, strict=True)}


def run_archive(path: Path, *inputs: Tensor) -> dict[str, Tensor]:
    return torch.export.load(path).module()(*inputs)


RUN = {".onnx": run_onnx, ".pt2": run_archive}


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("ending", RUN)
@pytest.mark.parametrize("link, covariance", [("probit", "diagonal"), ("mean_field", "full"), ("bridge", "diagonal")])
def test_classifier(ending: str, link: Any, covariance: Any, tmp_path: Path) -> None:
    model, x = mlp()
    net = pg.streamline(model, posterior(model), x[:1], covariance=covariance)
    classifier = pg.Classifier(net, link, scale=0.5)
    path = classifier.export(tmp_path / f"m{ending}", covariance=covariance == "full")
    found, latent = RUN[ending](path, x), classifier.latent(x)
    assert list(found)[:3] == ["mean", "variance", "probabilities"]
    assert_same(found["mean"], latent.mean)
    assert_same(found["variance"], latent.variance)
    assert_same(found["probabilities"], classifier(x).probs)
    if covariance == "full":
        assert_same(found["covariance"], latent.covariance)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", RUN)
def test_regressor(ending: str, tmp_path: Path) -> None:
    model, x = mlp(2)
    regressor = pg.Regressor(pg.streamline(model, posterior(model), x), noise=torch.tensor([0.1, 0.2]), scale=2.0)
    found = RUN[ending](regressor.export(tmp_path / f"m{ending}"), x[:3])
    assert_same(found["mean"], regressor(x[:3]).mean)
    assert_same(found["variance"], regressor(x[:3]).variance)
    assert_same(found["epistemic_variance"], regressor.decompose(x[:3]).epistemic)


@pytest.mark.parametrize("ending", RUN)
@pytest.mark.parametrize("make", [mlp, cnn, resnet, vit])
def test_any_batch(make: Any, ending: str, tmp_path: Path) -> None:
    model, x = make()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x[:2]))
    path = classifier.export(tmp_path / f"m{ending}")
    if ending == ".onnx":
        assert_standard(path)
    for batch in (1, 2, 5):
        found, latent = RUN[ending](path, x[:batch]), classifier.latent(x[:batch])
        assert_same(found["mean"], model_output(model, x[:batch]))
        assert_same(found["variance"], latent.variance)
        assert_same(found["probabilities"], classifier(x[:batch]).probs)


@pytest.mark.parametrize("ending", RUN)
@pytest.mark.parametrize("mode", ["linearise", "moments"])
def test_activations(mode: Any, ending: str, tmp_path: Path) -> None:
    """Of those in torch.nn, the ones whose derivative the exporters could not follow, and their like."""
    torch.manual_seed(0)
    kinds = (nn.SELU, nn.Mish, nn.Hardshrink, nn.Softshrink, nn.Hardswish, nn.CELU, nn.Softsign, nn.Tanhshrink)
    kinds = (*kinds, lambda: nn.Threshold(0.1, -1.0))
    model = nn.Sequential(*(m for kind in kinds for m in (nn.Linear(6, 6), kind()))).eval()
    x = 2 * torch.randn(5, 6)
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x, activation=mode))
    found = RUN[ending](classifier.export(tmp_path / f"m{ending}"), x[:3])
    latent = classifier.latent(x[:3])
    assert_same(found["mean"], model(x[:3]) if mode == "linearise" else latent.mean)
    assert_same(found["variance"], latent.variance)


def test_an_export_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its derivative left to PyTorch, this activation makes the exporter fail with that derivative still open."""
    for table in (CLOSED, TANGENTS):
        monkeypatch.delitem(table, torch.ops.aten.hardshrink.default)
    model, x = mlp()
    model[1] = nn.Hardshrink()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x))
    expected = classifier.latent(x).variance
    with pytest.raises(pg.InputError, match=r"export to \.pt2 instead"):
        classifier.export(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(classifier.latent(x).variance, expected)
    torch.testing.assert_close(pg.streamline(model, posterior(model), x)(x).variance, expected)
    assert_same(run_archive(classifier.export(tmp_path / "m.pt2"), x)["variance"], expected)


def model_output(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return getattr(output, "logits", output)


def assert_standard(path: Path) -> None:
    """Only operators of ONNX itself, and no functions made of them."""
    graph = onnx.load(path)
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert {opset.domain for opset in graph.opset_import} <= {"", "ai.onnx"}
    assert not graph.functions


@pytest.mark.parametrize("ending", RUN)
def test_tokens_by_name(ending: str, tmp_path: Path) -> None:
    model, x = gpt()
    classifier = pg.Classifier(pg.streamline(model, posterior(model, 1e-4), x))
    path = classifier.export(tmp_path / f"m{ending}")
    order = sorted(x)  # keyword arguments are in the order of their names
    if ending == ".onnx":
        assert_standard(path)
        assert [i.name for i in ort.InferenceSession(str(path)).get_inputs()] == order
    for batch, length in ((5, 6), (1, 6), (2, 4)):
        some = {name: t[:batch, :length] for name, t in x.items()}
        found = RUN[ending](path, *(some[name] for name in order))
        assert_same(found["probabilities"], classifier(**some).probs)
        assert_same(found["variance"], classifier.latent(**some).variance)


def test_sizes_that_the_exporter_fixes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = mlp()
    net = pg.streamline(model, posterior(model), x)
    own = net.from_leaves
    monkeypatch.setattr(net, "from_leaves", lambda leaves: own([leaves[0] + 0 * int(leaves[0].shape[0])]))
    with pytest.warns(UserWarning, match=r"no other sizes: x is 5 along dimension 0"):
        pg.Classifier(net).export(tmp_path / "m.pt2")


@pytest.mark.parametrize("ending", RUN)
def test_uncertain_input(ending: str, tmp_path: Path) -> None:
    model, x = mlp()
    example = pg.Gaussian(x, variance=torch.full_like(x, 0.1))
    classifier = pg.Classifier(pg.streamline(model, posterior(model), example))
    found = RUN[ending](classifier.export(tmp_path / f"m{ending}"), x, example.variance)
    assert_same(found["variance"], classifier.latent(example).variance)


def run_without(refused: tuple[str, ...], code: str) -> str:
    """What a Python process prints in which some packages cannot be imported."""
    preamble = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name.split('.')[0] in {refused!r}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    done = subprocess.run([sys.executable, "-c", preamble + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_archive_runs_without_propagauss(tmp_path: Path) -> None:
    model, x = mlp()
    path = pg.Classifier(pg.streamline(model, posterior(model), x)).export(tmp_path / "m.pt2")
    code = (
        "import torch\n"
        f"print(tuple(torch.export.load({str(path)!r}).module()(torch.zeros(7, 6))['probabilities'].shape))\n"
    )
    assert run_without(("propagauss",), code).strip() == "(7, 3)"


def test_graph_runs_without_torch(tmp_path: Path) -> None:
    model, x = mlp()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x))
    path = classifier.export(tmp_path / "m.onnx")
    code = (
        "import json, numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(path)!r})\n"
        f"x = numpy.array({x.tolist()!r}, dtype=numpy.float32)\n"
        "print(json.dumps(session.run(['probabilities'], {'x': x})[0].tolist()))\n"
        "assert 'torch' not in sys.modules\n"
    )
    found = torch.tensor(json.loads(run_without(("torch", "propagauss"), code)))
    assert_same(found, classifier(x).probs)


def test_files_say_what_they_hold(tmp_path: Path) -> None:
    model, x = mlp()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x), "mean_field", scale=0.25)
    meta = ort.InferenceSession(str(classifier.export(tmp_path / "m.onnx"))).get_modelmeta().custom_metadata_map
    assert meta["link"] == "mean_field" and meta["scale"] == "0.25" and meta["propagauss"] == pg.__version__
    with zipfile.ZipFile(classifier.export(tmp_path / "m.pt2")) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("propagauss.json"))
        assert json.loads(archive.read(name))["link"] == "mean_field"


def test_errors(tmp_path: Path) -> None:
    model, x = mlp()
    net = pg.streamline(model, posterior(model), x, covariance="full")
    with pytest.raises(pg.InputError, match="must end in"):
        pg.Classifier(net).export(tmp_path / "m.txt")
    with pytest.raises(pg.InputError, match="no folder"):
        pg.Classifier(net).export(tmp_path / "nowhere" / "m.pt2")
    with pytest.raises(pg.InputError, match="only a streamlined"):
        pg.Classifier(pg.baselines.MAP(model)).export(tmp_path / "m.pt2")
    old = tmp_path / "m.onnx"
    old.write_text("old")
    with pytest.raises(pg.InputError, match="Cholesky"):
        pg.Classifier(net, "monte_carlo").export(old)
    assert old.read_text() == "old" and list(tmp_path.iterdir()) == [old]
