"""The report: one HTML file that needs nothing else, and all numbers as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from propagauss.demo.compute import Demo, Study
from propagauss.demo.methods import EXACT, OURS, Result
from propagauss.demo.report import commentary, html, plots, tables
from propagauss.demo.report.files import write as write_file


def write(demo: Demo, folder: Path) -> Path:
    """`report.html`, `results.json` and three of the plots in `folder`; returns the path of the report."""
    write_file(folder / "results.json", json.dumps(demo.as_dict(), indent=2, allow_nan=False) + "\n")
    figures = {
        "opening": plots.opening(demo.opening),
        "cost": plots.cost(demo.digits.results),
        "bands": plots.bands(demo.bands, demo.grid, demo.picture.train, demo.picture.test),
    }
    for name, svg in figures.items():
        write_file(folder / f"{name}.svg", svg)
    return write_file(folder / "report.html", _page(demo, figures))


def _page(demo: Demo, figures: Mapping[str, str]) -> str:
    sections = [
        _head(demo),
        _opening(demo, figures["opening"]),
        _digits(demo, figures["cost"]),
        _diabetes(demo),
        _picture(demo, figures["bands"]),
        _details(demo),
    ]
    return html.page("propagauss demo", "".join(sections))


def _head(demo: Demo) -> str:
    quick = (
        "<p><strong>Quick run</strong>: small networks, little training and few samples; the numbers mean little.</p>"
        if demo.settings.quick
        else ""
    )
    return (
        "<h1>propagauss demo: one forward pass and its alternatives</h1>"
        "<p>Small networks were trained on data sets that come with scikit-learn, and Laplace posteriors (diagonal, "
        "Kronecker and full, over all weights) were fitted around them. Every way of predicting with such a posterior "
        "got the same treatment: what it has to fit was fitted on the validation part, and all scores below are from "
        f"the test part.</p>{quick}"
        f'<p class="soft">Method names: <em>{OURS}</em> and <em>{EXACT}</em> are the two engines of propagauss; the '
        "second is exact for the network linearised in its weights, the usual predictive of a Laplace posterior. "
        f"<em>Sampling</em> averages over {demo.settings.samples} draws of the weights. Where methods are compared, "
        "the variant of each is the one that did best on the validation part. ± is one standard error.</p>"
    )


def _opening(demo: Demo, svg: str) -> str:
    found = demo.opening
    return (
        "<h2>What a network does not know</h2>"
        f"<p>A small network was trained on {len(found.train[0])} observations of a sine, from two stretches of the "
        "line. The plain model gives a number everywhere, and knows of no other uncertainty than the noise. The "
        "linearised predictive (<code>pg.linearise</code>, one pass, nothing fitted on held-out data) has a standard "
        f"deviation {found.multiples['between']:.0f} times the noise midway between the two stretches and "
        f"{found.multiples['away']:.0f} times at the right end, and where there are data its 95% intervals contain "
        f"{found.inside:.1%} of new observations.</p>"
        + html.figure(
            svg,
            "Mean and two standard deviations, noise included. The posterior is a Laplace approximation with a full "
            "covariance over all weights, its prior precision and noise those of largest marginal likelihood.",
        )
    )


def _digits(demo: Demo, cost: str) -> str:
    study = demo.digits
    labels = study.split.test[1]
    chosen = _chosen(study.results)
    notes = [
        *commentary.verdict(study.results),
        commentary.accuracies(study.results),
        commentary.scales(study.results),
        commentary.times(study.results, demo.map_seconds, demo.settings.timing_batch),
    ]
    return (
        f'<h2>Digits: classification</h2>{_about(study)}<p class="soft">{escape(commentary.prior(study.priors))}</p>'
        f"{html.bullets(notes)}{tables.to_html(study.results, tables.CLASSIFICATION)}{_legend()}"
        + html.figure(
            plots.reliability(chosen, labels),
            f"Reliability, {plots.BINS} bins (Kronecker posterior, scale fitted, mean-field link). Calibrated "
            "predictions lie on the diagonal, up to chance: the grey bars are two standard errors for a bin of that "
            "size. Below: share of predictions by confidence, on a logarithmic scale.",
        )
        + '<div class="pair">'
        + html.figure(
            cost,
            "NLPD against time, scales fitted on the validation part. Hollow: probit link. Lower and further left is "
            "better; the grey band is one standard error of MAP's NLPD to either side.",
        )
        + html.figure(
            plots.rejection(chosen, labels),
            "Accuracy on what is left when the predictions of largest entropy are rejected (Kronecker posterior, scale "
            "fitted, mean-field link).",
        )
        + "</div>"
    )


def _diabetes(demo: Demo) -> str:
    study = demo.diabetes
    notes = [*commentary.verdict(study.results), commentary.scales(study.results)]
    return (
        f"<h2>Diabetes: regression</h2>{_about(study)}{html.bullets(notes)}"
        f"{tables.to_html(study.results, tables.REGRESSION)}{_legend()}"
        '<p class="soft">Targets are standardised. At scale 1 the noise is that of largest marginal likelihood; '
        "otherwise scale and noise were fitted on the validation part, and so was the noise of MAP.</p>"
    )


def _picture(demo: Demo, svg: str) -> str:
    sizes = demo.picture.sizes
    return (
        "<h2>A picture in one dimension</h2>"
        f"<p>Progress of diabetes from the body mass index alone: {sizes['train']} training and {sizes['validation']} "
        f"validation points, and {sizes['test']} points (hollow) that were kept from all methods to leave a gap. "
        "Sampling is the reference for what a posterior implies, however wide that is.</p>"
        + html.bullets(commentary.widths(demo.bands))
        + html.figure(
            svg,
            "Mean and two standard deviations, of the latent function (dark) and with the noise (light); body mass "
            "index against progress of diabetes, both standardised. As it is: scale 1 and the noise of largest "
            "marginal likelihood. Fitted: scale and noise from the validation part, which has no points in "
            "the gap either.",
        )
    )


def _details(demo: Demo) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in demo.versions.items())
    return (
        "<h2>What was run</h2><p>The plan of the streamlined digits network under its Kronecker posterior, as "
        f"<code>print(net.plan)</code> shows it:</p><pre>{escape(demo.digits.plan)}</pre>"
        f'<p class="soft">{escape(versions)}; seed {demo.settings.seed}; one thread; {demo.elapsed:.0f} s. All '
        "numbers are in <code>results.json</code> beside this file.</p>"
    )


def _chosen(results: Sequence[Result]) -> list[Result]:
    """One of each method: Kronecker posterior, fitted, mean-field where there is a link."""
    return [
        r
        for r in results
        if r.method == "MAP" or (r.fitted and r.posterior in ("", "kronecker") and r.link in ("", "mean_field"))
    ]


def _about(study: Study) -> str:
    return f'<p class="soft">{escape(tables.describe(study.sizes, study.parameters, study.split.sizes))}.</p>'


def _legend() -> str:
    return (
        '<p class="soft">★ least NLPD; ≈ not told apart from it on these test points (less than two standard errors of '
        "the difference). Scale 1 is the posterior as it was fitted; every other scale is from the validation part.</p>"
    )
