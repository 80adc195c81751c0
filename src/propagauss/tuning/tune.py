"""`tune`: try many ways to predict on held-out data, and return the best, calibrated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from propagauss.alone import quiet
from propagauss.checks import flag, positive
from propagauss.engines.linearise import linearise
from propagauss.engines.streamline import streamline
from propagauss.errors import InputError, PropagaussError
from propagauss.gaussian import Gaussian
from propagauss.inputs import as_model, as_tensor, batches, call, check_eval, device_of, explained, taken_by
from propagauss.likelihoods import Likelihood
from propagauss.likelihoods.registry import LikelihoodName, as_likelihood
from propagauss.posteriors import Posterior, fit_laplace
from propagauss.posteriors.precision import with_prior_precision
from propagauss.predictive.calibration import latents
from propagauss.predictive.predictor import Predictor
from propagauss.tracing.once import traced_once
from propagauss.tuning.candidates import LINKS, PRIORS, Candidate, Fitted, baselines, engines, posteriors
from propagauss.tuning.cost import batch_of, cost, memory
from propagauss.tuning.groups import LAST_LAYER
from propagauss.tuning.judge import Latents, judge
from propagauss.tuning.leaderboard import Leaderboard, choose
from propagauss.tuning.predictors import predictor, with_class_dim
from propagauss.tuning.rows import Entry, Row

TIMED = 64  # inputs with which costs are measured
LARGE, DENSE = 256, 64  # outputs of a sample, and of one with many positions: of more, variances alone are kept


def tune(
    model: nn.Module,
    train: Iterable[Any],
    validation: Iterable[Any],
    likelihood: LikelihoodName | Likelihood = "classification",
    budget: float = 5.0,
    progress: bool = True,
) -> Any:
    """The best way to predict with a trained model, found on held-out data, calibrated and ready to be saved.

    It tries Laplace posteriors over the last layer, the last block and all parameters, in every structure that is small
    enough, streamlined and linearised, with several links and prior precisions; and the plain model, as it is and with
    a temperature (or noise). Each is calibrated on four fifths of the validation data and scored on the rest, in turn.
    Of those within two standard errors of the least NLPD, paired over the data points, and half a one of the best plain
    model, that is taken whose epistemic uncertainty says most: linearised rather than streamlined, of all parameters
    rather than some. So a posterior has to be as good as the plain model to be taken, and if none is, the plain model
    or its temperature wins, and `leaderboard` says so. What fails is a line there, never an error.

    Args:
        model: trained, in evaluation mode; it is read, never changed.
        train: the training data, as `fit_laplace` takes them; read several times.
        validation: held-out data of the same form; a few hundred points or more.
        likelihood: as in `fit_laplace`: a name, or one of `propagauss.likelihoods` with options of its own, such as
            `CategoricalLikelihood(ignore_index=255)`; its link is not used. The dimension of the classes, if it is not
            given, is the one that labels do not have: 1 for logits `[B, C, H, W]`.
        budget: what a prediction may cost, as a ratio to the time of a plain forward pass of 64 inputs; one that takes
            less than a millisecond counts as a millisecond.
        progress: show a progress bar, if the output is a terminal.

    Returns:
        A `Classifier`, `Regressor` or other predictor, calibrated on all validation data, with `.leaderboard`.
    """
    named = as_likelihood(likelihood)
    budget, progress = positive(budget, "budget"), flag(progress, "progress")
    model = as_model(model)
    check_eval(model)
    trial = _Trial(model, _kept(train), _kept(validation), named, budget)
    with traced_once(), tqdm(trial.entries(), desc="tune", leave=False, disable=None if progress else True) as bar:
        for entry in bar:
            bar.set_postfix_str(entry.row.name)
    return trial.best()


def _kept(loader: Any) -> Any:
    """What can be read once only is kept, since it is read again."""
    return list(loader) if isinstance(loader, Iterator) else loader


class _Trial:
    """All that was tried with one model so far."""

    def __init__(self, model: nn.Module, train: Any, validation: Any, likelihood: Likelihood, budget: float):
        self.model, self.train, self.validation = model, train, validation
        self.budget = budget
        first, y = next(iter(batches(validation, taken_by(model), device_of(model))))
        self.example, self.timed = (batch_of(first, len(y), size) for size in (2, TIMED))
        with torch.no_grad(), explained(model, first, "the validation data: "):
            given = call(model, first)
            output = as_tensor(likelihood.joined(given))
        self.heads = 1 if isinstance(given, Tensor) or likelihood.joined(given) is given else 2
        self.likelihood = with_class_dim(likelihood, output, y)
        self.is_large = output.numel() > (LARGE if output.dim() < 3 else DENSE) * len(y)
        self.found: list[Entry] = []
        self._posteriors: dict[tuple[str, str], Posterior] = {}
        self._refused: list[Exception] = []  # why there is no posterior

    def entries(self) -> Iterator[Entry]:
        """Candidates one by one, each judged: first with the fitted prior precision, then the best with others."""
        yield from self._baselines()
        for title, names, structure in posteriors(self.model, self.heads):
            yield from self._group(title, names, structure)
        yield from self._priors()

    def best(self) -> Predictor:
        """The winner, calibrated on all the data."""
        judged = [e for e in self.found if e.verdict is not None]
        if not judged:
            raise InputError(f"nothing could be tried: {self.found[0].row.failure}")
        if self._refused and not self._posteriors and all(isinstance(e, InputError) for e in self._refused):
            raise InputError(f"no posterior could be fitted to the training data: {self._refused[0]}")
        points = len(judged[0].judged.losses)
        winner, why = choose(judged, points)
        found = predictor(self._net(winner.candidate), self.likelihood, winner.candidate.link)
        if winner.candidate.calibrated:
            with quiet():  # the leaderboard says it
                found.calibrate(self.validation, progress=False)
        found.leaderboard = Leaderboard(self.found, winner, why, points)  # type: ignore[assignment]
        return found

    # -- the parts

    def _baselines(self) -> Iterator[Entry]:
        given = list(baselines(self.likelihood.name, free=self._has_numbers()))
        yield from self._judged(given)

    def _has_numbers(self) -> bool:
        """Whether the likelihood has anything of its own to fit."""
        return type(self.likelihood).free is not Likelihood.free

    def _group(self, title: str, names: tuple[str, ...], structure: Fitted) -> Iterator[Entry]:
        links = LINKS.get(self.likelihood.name, ("",))
        given = [Candidate(title, structure, e, link) for e in engines(title, structure) for link in links]
        try:
            with quiet():
                self._posteriors[title, structure] = fit_laplace(
                    self.model,
                    self.train,
                    self.likelihood,
                    structure,
                    names,
                    progress=False,
                )
        except _FAILURES as error:
            self._refused.append(error)
            for each in given:
                yield self._failed(each, error)
            return
        for engine in dict.fromkeys(each.engine for each in given):
            yield from self._judged([each for each in given if each.engine == engine])

    def _priors(self) -> Iterator[Entry]:
        """Other prior precisions for the network that is best so far."""
        judged = [e for e in self.found if e.verdict is not None and e.candidate.engine != "plain"]
        if judged:
            best = min(judged, key=lambda e: e.judged.nlpd)
            for factor in PRIORS:  # which costs the same
                yield from self._judged([replace(best.candidate, prior=factor)], best.row.cost)

    def _judged(self, given: list[Candidate], ratio: float | None = None) -> Iterator[Entry]:
        """Candidates that share their network: made, timed (unless it is known what it costs) and run over the data."""
        try:
            with quiet():
                net = self._net(given[0])
                ratio = ratio or (1.0 if given[0].engine == "plain" else self._ratio(net))
                found: Latents = [(latent.detach(), y) for latent, y in self._latents(net)]
        except _FAILURES as error:
            for each in given:
                yield self._failed(each, error)
            return
        for each in given:
            yield self._entry(each, net, ratio, found)

    def _latents(self, net: Any) -> Iterable[tuple[Gaussian, Tensor]]:
        return latents(net, self.validation, False, self.likelihood)

    def _ratio(self, net: Any) -> float:
        found = cost(net, self.model, self.example, self.timed, self.budget)
        if found.exceeds(self.budget):
            raise InputError(f"over the budget: {found.ratio:.1f} times a plain forward pass")
        return found.ratio

    def _entry(self, candidate: Candidate, net: Any, ratio: float, found: Latents) -> Entry:
        own = predictor(net, self.likelihood, candidate.link)
        try:
            with quiet():
                verdict = judge(found, own.likelihood, candidate.calibrated)
                if not verdict.losses.isfinite().all():
                    raise InputError("some predictions have no finite density")
        except _FAILURES as error:
            return self._failed(candidate, error)
        row = replace(
            self._row(candidate),
            nlpd=verdict.nlpd,
            error=verdict.error,
            ece=verdict.ece,
            aurc=verdict.aurc,
            cost=ratio,
            memory=memory(net, self.model),
        )
        self.found.append(Entry(row, candidate, verdict))
        return self.found[-1]

    def _failed(self, candidate: Candidate, error: Exception) -> Entry:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        self.found.append(Entry(replace(self._row(candidate), failure=text[:120]), candidate))
        return self.found[-1]

    def _row(self, candidate: Candidate) -> Row:
        posterior = self._posteriors.get((candidate.parameters, candidate.structure))
        precision = posterior.details["prior_precision"] * candidate.prior if posterior is not None else None
        parts = candidate.parameters, candidate.structure, candidate.engine, candidate.link
        return Row(candidate.name, *parts, prior_precision=precision)

    def _net(self, candidate: Candidate) -> Any:
        if candidate.engine == "plain":
            return streamline(self.model, None, self.example)
        posterior = self._posteriors[candidate.parameters, candidate.structure]
        if candidate.prior != 1:
            posterior = with_prior_precision(posterior, posterior.details["prior_precision"] * candidate.prior)
        if candidate.engine == "linearised":
            return linearise(self.model, posterior, self.example, covariance="diagonal" if self.is_large else "full")
        # the whole covariance of the outputs of a last layer costs little, if they are not very many
        kind = "full" if candidate.parameters == LAST_LAYER and not self.is_large else "diagonal"
        return streamline(self.model, posterior, self.example, covariance=kind)


_FAILURES = (PropagaussError, RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError, NotImplementedError)
