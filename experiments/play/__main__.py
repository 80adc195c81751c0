"""`python -m experiments.play --data DIR`: writes `digits.onnx`, `pictures.png` and `digits.json` into `docs/play`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.datasets import Images, Pair, images
from experiments.frame.experiment import Context
from experiments.play.network import EPOCHS, train
from experiments.play.predictor import answers, histogram, predictor
from propagauss import metrics
from propagauss.cli import guarded, seed
from propagauss.demo.report.files import write

USUAL = 0.9  # share of test digits that count as usual
DIGITS = tuple(f"a {digit}" for digit in range(10))
# Network, layers and measure were chosen with Fashion-MNIST in view; these sets were not looked at.
OTHERS = {"cifar10": "CIFAR-10", "dtd10_64px": "textures", "pneumoniamnist": "chest X-rays"}
CLOTHES = ("T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "trainer", "bag", "boot")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.play", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (or set PROPAGAUSS_DATA)")
    parser.add_argument("--out", type=Path, default=Path("docs/play"), metavar="DIR", help="where the files go")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of training and of what moves the images")
    parser.add_argument("--epochs", type=int, default=EPOCHS, metavar="N", help="of training")
    return guarded(_run, parser.parse_args(), "python -m experiments.play")


def _run(args: argparse.Namespace) -> int:
    context = Context("full", args.seed, args.data)
    digits, fashion = images(context, "mnist"), images(context, "fashion_mnist")
    others = {title: grey(images(context, name).test[0]) for name, title in OTHERS.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    make(digits, fashion, others, args.out, args.seed, args.epochs)
    return 0


def grey(x: Tensor) -> Tensor:
    """Images `[N, C, H, W]` as those of MNIST: one channel, 28×28."""
    return F.interpolate(x.mean(1, keepdim=True), (28, 28), mode="area")


def make(
    digits: Images, fashion: Images, others: Mapping[str, Tensor], out: Path, seed: int = 0, epochs: int = EPOCHS
) -> None:
    """The three files of the page."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = train(digits.train, epochs)
        classifier = predictor(model, digits)
    print(f"{classifier.link}: {classifier.fit_report}")
    file = out / "digits.onnx"
    file.unlink(missing_ok=True)
    classifier.export(file, covariance=True)
    chosen = [*_one_of_each(digits.test, "digit", DIGITS), *_one_of_each(fashion.test, "fashion", CLOTHES)]
    _save(torch.stack([x for x, _, _ in chosen]), out / "pictures.png")
    found = facts(answers(classifier, digits.test[0]), digits.test[1], answers(classifier, fashion.test[0]))
    uncertainties = {title: answers(classifier, x)[2] for title, x in others.items()}
    found["told"]["others"] = elsewhere(uncertainties, found["usual"])
    weights = sum(p.numel() for p in model.parameters())
    found["told"] |= {"network": f"three convolutions and two linear layers, {weights:,} weights"}
    found["told"] |= {"size": f"{file.stat().st_size / 1e6:.1f} megabytes"}
    found["pictures"] = [{"kind": kind, "name": name} for _, kind, name in chosen]
    write(out / "digits.json", json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["told"] | found["scores"], indent=1))


Answers = tuple[Tensor, Tensor, Tensor]


def facts(inside: Answers, labels: Tensor, outside: Answers) -> dict[str, Any]:
    """What the page shows beside an image's own numbers: where test digits and other images lie."""
    plain, bayesian, known = inside
    unknown = outside[2]
    usual = known.quantile(USUAL).item()
    low, high = torch.cat([known, unknown]).quantile(torch.tensor([0.001, 0.999])).tolist()
    above = (unknown > usual).double().mean().item()
    shares = torch.linspace(0, 1, 1001)
    right = (bayesian.argmax(-1) == labels).double().mean().item()
    scores = {
        "nlpd": {kind: _nlpd(p, labels) for kind, p in (("plain", plain), ("bayesian", bayesian))},
        "confidence, digits": {"plain": _confidence(plain), "bayesian": _confidence(bayesian)},
        "confidence, fashion": {"plain": _confidence(outside[0]), "bayesian": _confidence(outside[1])},
        "auroc": {
            "entropy, plain": _auroc(*(metrics.predictive_entropy(p) for p in (plain, outside[0]))),
            "entropy, bayesian": _auroc(*(metrics.predictive_entropy(p) for p in (bayesian, outside[1]))),
            "uncertainty": _auroc(known, unknown),
        },
    }
    return {
        "told": {
            "accuracy": f"{right:.1%}",
            "above": f"{above:.1%}",
            "below": f"{1 - above:.1%}",
            "plain": f"{scores['confidence, fashion']['plain']:.0%}",
            "bayesian": f"{scores['confidence, fashion']['bayesian']:.0%}",
            "nlpd-plain": f"{scores['nlpd']['plain']:.4f}",
            "nlpd-bayesian": f"{scores['nlpd']['bayesian']:.4f}",
        },
        "scores": scores,
        "usual": usual,
        "low": low,
        "high": high,
        "quantiles": [round(q, 5) for q in known.quantile(shares).tolist()],
        "histograms": {"digits": histogram(known, low, high), "fashion": histogram(unknown, low, high)},
    }


def elsewhere(uncertainties: Mapping[str, Tensor], usual: float) -> str:
    """The share of images above what is usual for digits, by data set."""
    return ", ".join(f"{title} {(u > usual).double().mean():.1%}" for title, u in uncertainties.items())


def _one_of_each(test: Pair, kind: str, names: Sequence[str]) -> list[tuple[Tensor, str, str]]:
    """The first test image of each class, its kind and its name."""
    x, y = test
    return [(x[int((y == label).nonzero()[0]), 0], kind, name) for label, name in enumerate(names)]


def _save(tiles: Tensor, path: Path) -> None:
    """Images `[N, 28, 28]` side by side."""
    from PIL import Image

    strip = (255 * torch.cat(list(tiles), 1)).round().byte().numpy()
    Image.fromarray(strip).save(path, optimize=True)


def _nlpd(probabilities: Tensor, labels: Tensor) -> float:
    return -probabilities.gather(1, labels[:, None]).log().mean().item()


def _confidence(probabilities: Tensor) -> float:
    return probabilities.max(-1).values.mean().item()


def _auroc(inside: Tensor, outside: Tensor) -> float:
    positive = torch.arange(len(inside) + len(outside)) >= len(inside)
    return metrics.auroc(torch.cat([inside, outside]), positive)


if __name__ == "__main__":
    sys.exit(main())
