"""The methods on a classification problem."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from propagauss import metrics
from propagauss.demo.data import Split
from propagauss.demo.methods import EXACT, OURS, Result, Sampler, fit_class_sampler
from propagauss.demo.timing import relative_times
from propagauss.engines.linearise import Linearised, linearise
from propagauss.engines.streamline import Streamlined
from propagauss.likelihoods.links import categorical
from propagauss.posteriors import Posterior
from propagauss.predictive.baselines import MAP, TemperatureScaling
from propagauss.predictive.classifier import Classifier

# how both engines are shown: (link, whether the scale is fitted)
VARIANTS = (("probit", False), ("probit", True), ("mean_field", True))


@torch.no_grad()
def compare(
    model: nn.Module,
    posteriors: Mapping[str, Posterior],
    nets: Mapping[str, Streamlined],
    split: Split,
    samples: int,
    seed: int,
    step: Callable[[str], None],
) -> list[Result]:
    """Every method on the test part; `step` is told what comes next. Only the validation part is ever fitted to."""
    step("MAP and temperature scaling")
    temperature = TemperatureScaling(model).fit(split.validation_loader, progress=False)
    results = [
        _score(Result("MAP", predict=model), lambda x: MAP(model)(x).mean.log_softmax(-1), split),
        _score(
            Result("temperature scaling", scale=temperature.temperature, fitted=True),
            lambda x: _log_probs(temperature(x)),
            split,
        ),
    ]
    results[1].predict = lambda x: (model(x) / temperature.temperature).log_softmax(-1)
    for name, posterior in posteriors.items():
        step(f"sampling, {name}")
        results += _sampling(Sampler(model, posterior, samples, seed), name, split)
    exact = {name: linearise(model, posterior, split.train[0][:2]) for name, posterior in posteriors.items()}
    for method, made in ((EXACT, exact), (OURS, nets)):
        for name in posteriors:
            step(f"{method}, {name}")
            results += _gaussian(method, name, made[name], split)
    return results


def _sampling(sampler: Sampler, posterior: str, split: Split) -> list[Result]:
    fitted = fit_class_sampler(sampler, *split.validation)
    return [
        _score(
            Result("sampling", posterior, scale=s.scale, fitted=s is fitted, predict=s.log_probs),
            s.log_probs,
            split,
        )
        for s in (sampler, fitted)
    ]


def _gaussian(method: str, posterior: str, net: Linearised | Streamlined, split: Split) -> list[Result]:
    results = []
    for link, fitted in VARIANTS:
        classifier = Classifier(net, link)  # type: ignore[arg-type]
        if fitted:
            classifier.fit_scale(split.validation_loader, progress=False)
        result = Result(method, posterior, link, classifier.scale, fitted, predict=classifier.log_probs)
        results.append(_score(result, lambda x, c=classifier: _log_probs(c(x)), split))
    return results


def _score(result: Result, log_probs: Callable[[Tensor], Tensor], split: Split) -> Result:
    x, y = split.validation
    result.validation = metrics.nlpd(categorical(log_probs(x)), y)
    x, y = split.test
    predictive = categorical(log_probs(x))
    result.metrics = {
        "accuracy": metrics.accuracy(predictive, y),
        "nlpd": metrics.nlpd(predictive, y),
        "ece": metrics.ece(predictive, y),
    }
    result.losses = -predictive.log_prob(y)
    result.probs = predictive.probs
    return result


def _log_probs(predictive: Categorical) -> Tensor:
    return predictive.logits.log_softmax(-1)


@torch.no_grad()
def add_times(results: list[Result], x: Tensor, rounds: int, seed: int) -> float:
    """Set `time` of each result, relative to the first one (MAP); returns the seconds of that one.

    It is the time of the processor, as the demo runs in one thread. A fitted scale changes nothing about the work, so
    only one result of each kind is run.
    """
    calls = {r.name: r.predict for r in results if r.predict is not None}
    bound = {name: lambda call=call: call(x) for name, call in calls.items()}
    ratios, seconds = relative_times(bound, results[0].name, rounds, seed, clock=time.process_time)
    for result in results:
        result.time = ratios.get(result.name)
    return seconds
