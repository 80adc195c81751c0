"""What may be wrong in calls of metrics, links, baselines and tasks."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
from torch.distributions import Normal, Poisson

from arguments.given import NAN, PROBS, TARGETS, Row, V, X, Y, adder, fidelity
from propagauss import baselines, links, metrics, tasks

ROWS: list[Row] = []
add = adder(ROWS)

NORMAL = Normal(TARGETS, torch.ones(4, 2))
add(
    "metrics.nlpd",
    ("no counts", lambda t: metrics.nlpd(Poisson(TARGETS.exp()), TARGETS), "a Poisson cannot take.*support"),
)
add("metrics.ece", ("many bins", lambda t: metrics.ece(PROBS, Y, bins=10**12), "bins is .*at most"))
for _name in ("accuracy", "brier", "ece", "nlpd"):
    _metric = getattr(metrics, _name)
    _given = PROBS.log() if _name == "nlpd" else PROBS
    add(
        f"metrics.{_name}",
        ("a list", lambda t, f=_metric: f(PROBS.tolist(), Y), "predictions is a list of 4.*as_tensor"),
        ("float labels", lambda t, f=_metric, p=_given: f(p, Y.float()), r"labels are torch.float32.*\.long\(\)"),
        ("a list of labels", lambda t, f=_metric, p=_given: f(p, Y.tolist()), "labels is a list of 4.*as_tensor"),
        ("fewer labels", lambda t, f=_metric, p=_given: f(p, Y[:2]), r"labels have shape \(2,\)"),
        ("other labels", lambda t, f=_metric, p=_given: f(p, Y + 5), "labels range from 5"),
        ("nothing", lambda t, f=_metric, p=_given: f(p[:0], Y[:0]), "empty"),
        ("complex", lambda t, f=_metric: f(PROBS + 0j, Y), "complex64; real numbers"),
        ("NaN", lambda t, f=_metric: f(PROBS * NAN, Y), "NaN|sum to one|log-probabilities"),
    )
add(
    "metrics.predictive_entropy",
    ("logits", lambda t: metrics.predictive_entropy(PROBS * 5), r"sum to one: use logits\.softmax"),
    ("a normal", lambda t: metrics.predictive_entropy(NORMAL), "predictions are a Normal; give a Categorical"),
)
add(
    "metrics.rmse",
    ("a list", lambda t: metrics.rmse(NORMAL, TARGETS.tolist()), "targets is a list of 4.*as_tensor"),
    ("NaN", lambda t: metrics.rmse(TARGETS * NAN, TARGETS), "predictions have NaN"),
    ("shape", lambda t: metrics.rmse(NORMAL, TARGETS[:, :1]), "they must agree"),
)
add(
    "metrics.auroc",
    ("lists", lambda t: metrics.auroc([0.1, 0.2], [0, 1]), "scores is a list of 2.*as_tensor"),
    ("kinds", lambda t: metrics.auroc(V, torch.tensor([0, 2])), "0 and 1 only"),
    ("None", lambda t: metrics.auroc(V, None), "is_positive is None"),
)
for _name in ("aurc", "risk_coverage", "coverage_at_risk"):
    _more = (0.1,) if _name == "coverage_at_risk" else ()
    _curve = getattr(metrics, _name)
    add(
        f"metrics.{_name}",
        ("lists", lambda t, f=_curve, m=_more: f([0.1], [1], *m), "confidences is a list of 1.*as_tensor"),
        ("nothing", lambda t, f=_curve, m=_more: f(V[:0], V[:0], *m), "empty"),
        ("kinds", lambda t, f=_curve, m=_more: f(V, V * NAN, *m), "0 and 1 only: give prediction == label"),
        ("NaN", lambda t, f=_curve, m=_more: f(V * NAN, V, *m), "NaN values, which cannot be ranked"),
    )
add(
    "metrics.coverage_at_risk",
    ("risk", lambda t: metrics.coverage_at_risk(V, V, 1.5), "risk is 1.5.*between 0 and 1"),
)
for _name in ("probit", "mean_field", "monte_carlo", "bridge"):
    _link = getattr(links, _name)
    add(
        f"links.{_name}",
        ("a list", lambda t, f=_link: f([1.0, 2.0], V), "mean of the logits is a list of 2.*as_tensor"),
        ("variances", lambda t, f=_link: f(X, None), "covariance of the logits is None"),
        ("rows", lambda t, f=_link: f(X, X[:2]), r"shape \(4, 3\) and their covariance \(2, 3\)"),
        ("integers", lambda t, f=_link: f(Y, Y), r"torch.int64.*\.float\(\)"),
        ("no classes", lambda t, f=_link: f(torch.tensor(1.0), torch.tensor(1.0)), "no dimensions"),
    )
add(
    "links.monte_carlo",
    ("indefinite", lambda t: links.monte_carlo(X, -torch.ones(4, 3, 3)), "not positive semi-definite"),
)
add("links.categorical", ("NaN", lambda t: links.categorical(X * NAN), "logits have NaN values"))
for _name, _made in (("MAP", lambda t: baselines.MAP(t.model)), ("GLM", lambda t: t.glm)):
    add(
        f"baselines.{_name}",
        ("double", lambda t, f=_made: f(t)(X.double()), "input is torch.float64, the model torch.float32"),
        ("numpy", lambda t, f=_made: f(t)(X.numpy()), "does not run on a NumPy array"),
        ("width", lambda t, f=_made: f(t)(X[:, :2]), r"does not run on a tensor of shape \(4, 2\)"),
        ("nothing", lambda t, f=_made: f(t)(), "does not run on no inputs"),
    )
add(
    "baselines.MonteCarlo",
    ("None", lambda t: baselines.MonteCarlo(t.model, None), "posterior is None; give a DiagonalPosterior"),
    ("double", lambda t: t.montecarlo(X.double()), "input is torch.float64, the model torch.float32"),
    ("noise", lambda t: t.montecarlo.regress(X, "a"), "noise is 'a'"),
)
add("baselines.TemperatureScaling", ("None", lambda t: baselines.TemperatureScaling(None), "nn.Module, but is None"))
add(
    "tasks.ood",
    ("a model", lambda t: tasks.ood.scores(t.posterior, X), "map inputs to a Gaussian, but is a Diag"),
    ("no loader", lambda t: tasks.ood.scores(t.classifier, None), "the loader is None"),
    ("a latent", lambda t: tasks.ood.mutual_information(X), "a Gaussian is needed"),
    ("lists", lambda t: tasks.ood.evaluate(V, [1.0]), "scores outside is a list of 1"),
    ("other scores", lambda t: tasks.ood.evaluate_all(V, t.scores), "scores inside are a tensor"),
    ("nothing to join", lambda t: tasks.ood.Scores.cat([]), "no scores to join"),
    ("joined", lambda t: tasks.ood.Scores.cat([None]), "no scores to join: give a list"),
    ("no points", lambda t: tasks.ood.density(V, V[:0]), "no points"),
    ("plot", lambda t: tasks.ood.plot(None), "nothing to plot: give a dictionary"),
    ("plots", lambda t: tasks.ood.plot({"a": V[0]}), "scores of 'a' are .*pair"),
)
add(
    "tasks.selective",
    ("nothing", lambda t: tasks.selective.plot({}), "nothing to plot: give a dictionary"),
    ("a curve", lambda t: tasks.selective.plot({"a": V}), "'a'"),
)
add(
    "tasks.sensitivity",
    ("labels", lambda t: tasks.sensitivity.estimate(t.uncertain, X, Y.tolist()), "labels is a list of 4"),
    ("a model", lambda t: tasks.sensitivity.estimate(t.model, X, Y), "does not take a Gaussian"),
    ("NaN", lambda t: tasks.sensitivity.estimate(t.uncertain, X * NAN, Y), "x has values that are not finite"),
)
add(
    "tasks.fidelity",
    ("a model", lambda t: fidelity(t, net=t.model), "network is a Sequential.*make it with pg.streamline"),
    ("a classifier", lambda t: fidelity(t, net=t.classifier), r"network is a Classifier.*pass its \.net"),
    ("a function", lambda t: fidelity(t, model=lambda x: x), "nn.Module, but is a function"),
    ("a dictionary", lambda t: fidelity(t, posterior={"a": V}), "posterior is a dict.*DiagonalPosterior"),
    ("by_parameter", lambda t: fidelity(t, by_parameter="yes"), "by_parameter is 'yes'.*True or False"),
    ("outputs", lambda t: fidelity(t, outputs="a"), "outputs is 'a'.*list of indices"),
    ("outputs beyond", lambda t: fidelity(t, outputs=[99]), "outputs holds 99"),
    ("NaN", lambda t: fidelity(t, inputs=X * NAN), "not finite"),
    ("width", lambda t: fidelity(t, inputs=X[:, :2]), r"shape \(4, 2\)"),
    ("row", lambda t: fidelity(t).by_parameter[None], "no row None"),
    ("rows", lambda t: fidelity(t).by_parameter[9], "no row 9"),
)
add(
    "tasks.linearity",
    ("no model", lambda t: tasks.linearity.error(None, X), "the model is None; a module or a function"),
    ("epsilons", lambda t: tasks.linearity.error(t.model, X, 0.1), "epsilons is 0.1; a list of numbers"),
    ("an epsilon", lambda t: tasks.linearity.error(t.model, X, ["a"]), "one of epsilons is 'a'"),
    ("NaN", lambda t: tasks.linearity.error(t.model, X * NAN), "x has values that are not finite"),
    ("layers", lambda t: tasks.linearity.layers(t.model, X), "needs a streamlined net"),
    ("net", lambda t: tasks.linearity.against_samples(None, t.model, t.posterior, X), "Gaussian, but is None"),
    ("posterior", lambda t: tasks.linearity.against_samples(t.net, t.model, None, X), "posterior is None"),
)
