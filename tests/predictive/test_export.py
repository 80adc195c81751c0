"""Predictors outside Python: what the exported files return equals what the predictor returns."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from both_files import both_files
from network.test_compile import gpt, resnet, vit
from propagauss.rules.elementwise.activation import CLOSED
from propagauss.rules.elementwise.slopes import TANGENTS

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def known_ops() -> Iterator[None]:
    """PyTorch keeps what ops do to symbolic sizes (see conftest.py), since these networks repeat theirs many times."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=True):
        yield


def posterior(model: nn.Module, variance: float = 1e-2) -> pg.Posterior:
    return pg.DiagonalPosterior({n: torch.full_like(p, variance) for n, p in model.named_parameters()})


def mlp(outputs: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs)).eval(), torch.randn(5, 6)


def cnn() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    return nn.Sequential(*layers).eval(), torch.randn(5, 1, 8, 8)


Run = Callable[..., dict[str, Tensor]]


def run_onnx(path: Path) -> Run:
    session = ort.InferenceSession(str(path))
    names, outputs = ([value.name for value in values] for values in (session.get_inputs(), session.get_outputs()))

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        return {name: torch.from_numpy(v) for name, v in zip(outputs, found, strict=True)}

    return run


def run_archive(path: Path) -> Run:
    return torch.export.load(path).module()


RUN: dict[str, Callable[[Path], Run]] = {".onnx": run_onnx, ".pt2": run_archive}  # a file as a function of its inputs


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("link, covariance", [("probit", "diagonal"), ("mean_field", "full"), ("bridge", "diagonal")])
def test_classifier(link: Any, covariance: Any, tmp_path: Path) -> None:
    model, x = mlp()
    net = pg.streamline(model, posterior(model), x[:1], covariance=covariance)
    classifier = pg.Classifier(net, link, scale=0.5)
    files, latent = both_files(classifier, tmp_path, covariance=covariance == "full"), classifier.latent(x)
    for ending, path in files.items():
        found = RUN[ending](path)(x)
        assert list(found)[:3] == ["mean", "variance", "probabilities"]
        assert_same(found["mean"], latent.mean)
        assert_same(found["variance"], latent.variance)
        assert_same(found["probabilities"], classifier(x).probs)
        if covariance == "full":
            assert_same(found["covariance"], latent.covariance)
    assert set(tmp_path.iterdir()) == set(files.values())


class Words(nn.Module):
    """What a transformer has of its own: words, a token of the class before them, and a residual sum around `addmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(5, 2), nn.Parameter(torch.randn(1, 1, 2))
        self.norm, self.inner, self.head = nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.cat([self.first.expand(ids.shape[0], -1, -1), self.table(ids)], 1)
        inner = torch.addmm(self.inner.bias, self.norm(h).view(-1, 2), self.inner.weight)
        return self.head((h + inner.view(h.shape)).mean(1))


def words() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Words().eval(), torch.randint(5, (4, 2))


def patches() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 2, stride=2), nn.Flatten(), nn.Linear(8, 3)).eval(), torch.randn(4, 1, 4, 4)


@pytest.mark.parametrize("make", [words, patches])
def test_pieces_of_transformers_with_a_full_covariance(make: Any, tmp_path: Path) -> None:
    model, x = make()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x[:2], covariance="full"))
    for ending, path in both_files(classifier, tmp_path, covariance=True).items():
        run = RUN[ending](path)
        for batch in (x[:1], x):
            found, latent = run(batch), classifier.latent(batch)
            assert_same(found["mean"], latent.mean)
            assert_same(found["covariance"], latent.covariance)


def test_regressor(tmp_path: Path) -> None:
    model, x = mlp(2)
    regressor = pg.Regressor(pg.streamline(model, posterior(model), x), noise=torch.tensor([0.1, 0.2]), scale=2.0)
    for ending, path in both_files(regressor, tmp_path).items():
        found = RUN[ending](path)(x[:3])
        assert_same(found["mean"], regressor(x[:3]).mean)
        assert_same(found["variance"], regressor(x[:3]).variance)
        assert_same(found["epistemic_variance"], regressor.decompose(x[:3]).epistemic)


@pytest.mark.parametrize("make", [mlp, cnn, resnet, vit])
def test_any_batch(make: Any, tmp_path: Path) -> None:
    model, x = make()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x[:2]))
    files = both_files(classifier, tmp_path)
    assert_standard(files[".onnx"])
    for ending, path in files.items():
        run = RUN[ending](path)
        for batch in (1, 2, 5):
            found, latent = run(x[:batch]), classifier.latent(x[:batch])
            assert_same(found["mean"], model_output(model, x[:batch]))
            assert_same(found["variance"], latent.variance)
            assert_same(found["probabilities"], classifier(x[:batch]).probs)


@pytest.mark.parametrize("mode", ["linearise", "moments"])
def test_activations(mode: Any, tmp_path: Path) -> None:
    """Of those in torch.nn, the ones whose derivative the exporters could not follow, and their like."""
    torch.manual_seed(0)
    kinds = (nn.SELU, nn.Mish, nn.Hardshrink, nn.Softshrink, nn.Hardswish, nn.CELU, nn.Softsign, nn.Tanhshrink)
    kinds = (*kinds, lambda: nn.Threshold(0.1, -1.0))
    model = nn.Sequential(*(m for kind in kinds for m in (nn.Linear(6, 6), kind()))).eval()
    x = 2 * torch.randn(5, 6)
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x, activation=mode))
    latent = classifier.latent(x[:3])
    for ending, path in both_files(classifier, tmp_path).items():
        found = RUN[ending](path)(x[:3])
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
    assert_same(run_archive(classifier.export(tmp_path / "m.pt2"))(x)["variance"], expected)


def model_output(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return getattr(output, "logits", output)


def assert_standard(path: Path) -> None:
    """Only operators of ONNX itself, and no functions made of them."""
    graph = onnx.load(path)
    assert {node.domain for node in graph.graph.node} <= {"", "ai.onnx"}
    assert {opset.domain for opset in graph.opset_import} <= {"", "ai.onnx"}
    assert not graph.functions


def test_tokens_by_name(tmp_path: Path) -> None:
    model, x = gpt()
    classifier = pg.Classifier(pg.streamline(model, posterior(model, 1e-4), x))
    files = both_files(classifier, tmp_path)
    order = sorted(x)  # keyword arguments are in the order of their names
    assert_standard(files[".onnx"])
    assert [i.name for i in ort.InferenceSession(str(files[".onnx"])).get_inputs()] == order
    for ending, path in files.items():
        run = RUN[ending](path)
        for batch, length in ((5, 6), (1, 6), (2, 4)):
            some = {name: t[:batch, :length] for name, t in x.items()}
            found = run(*(some[name] for name in order))
            assert_same(found["probabilities"], classifier(**some).probs)
            assert_same(found["variance"], classifier.latent(**some).variance)


def test_sizes_that_the_exporter_fixes_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = mlp()
    net = pg.streamline(model, posterior(model), x)
    own = net.from_leaves
    monkeypatch.setattr(net, "from_leaves", lambda leaves: own([leaves[0] + 0 * int(leaves[0].shape[0])]))
    with pytest.warns(UserWarning, match=r"no other sizes: x is 5 along dimension 0"):
        pg.Classifier(net).export(tmp_path / "m.pt2")


def test_uncertain_input(tmp_path: Path) -> None:
    model, x = mlp()
    example = pg.Gaussian(x, variance=torch.full_like(x, 0.1))
    classifier = pg.Classifier(pg.streamline(model, posterior(model), example))
    for ending, path in both_files(classifier, tmp_path).items():
        found = RUN[ending](path)(x, example.variance)
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[pg.Classifier, Tensor, dict[str, Path]]:
    """A classifier, inputs for it, and its files."""
    model, x = mlp()
    classifier = pg.Classifier(pg.streamline(model, posterior(model), x), "mean_field", scale=0.25)
    return classifier, x, both_files(classifier, tmp_path_factory.mktemp("small"))


Small = tuple[pg.Classifier, Tensor, dict[str, Path]]


def test_archive_runs_without_propagauss(small: Small) -> None:
    path = small[2][".pt2"]
    code = (
        "import torch\n"
        f"print(tuple(torch.export.load({str(path)!r}).module()(torch.zeros(7, 6))['probabilities'].shape))\n"
    )
    assert run_without(("propagauss",), code).strip() == "(7, 3)"


def test_graph_runs_without_torch(small: Small) -> None:
    classifier, x, files = small
    path = files[".onnx"]
    code = (
        "import json, numpy, onnxruntime\n"
        f"session = onnxruntime.InferenceSession({str(path)!r})\n"
        f"x = numpy.array({x.tolist()!r}, dtype=numpy.float32)\n"
        "print(json.dumps(session.run(['probabilities'], {'x': x})[0].tolist()))\n"
        "assert 'torch' not in sys.modules\n"
    )
    found = torch.tensor(json.loads(run_without(("torch", "propagauss"), code)))
    assert_same(found, classifier(x).probs)


def test_files_say_what_they_hold(small: Small) -> None:
    _, _, files = small
    meta = ort.InferenceSession(str(files[".onnx"])).get_modelmeta().custom_metadata_map
    assert meta["link"] == "mean_field" and meta["scale"] == "0.25" and meta["propagauss"] == pg.__version__
    with zipfile.ZipFile(files[".pt2"]) as archive:
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
