"""The report: one HTML file that needs nothing else, and all numbers as JSON beside it."""

from __future__ import annotations

import base64
import html
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from propagauss.experiments import commentary, plots, tables
from propagauss.experiments.methods import OURS, Result

if TYPE_CHECKING:
    from propagauss.experiments.demo import Demo, Study

_CSS = """
:root { color-scheme: light dark; --text: #24292f; --soft: #646c76; --line: #d9dde2; --back: #ffffff; --tint: #f4f6f8;
  --ours: #e9f2fc; --accent: #1f6fbf; }
@media (prefers-color-scheme: dark) { :root { --text: #d5d9de; --soft: #969ea8; --line: #363c44; --back: #16191d;
  --tint: #1e2227; --ours: #1a2a3b; --accent: #6cb1f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .8rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .4rem; }
h3 { font-size: 1rem; margin: 2rem 0 .4rem; }
p, ul { max-width: 46rem; margin: .5rem 0 1rem; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--line); }
th, td { padding: .22rem .8rem; white-space: nowrap; }
th.number, td.number { text-align: right; }
tr.start td { border-top: 1px solid var(--line); }
tr.ours td { background: var(--ours); }
td:last-child { padding-right: 1.7rem; position: relative; }
tr.best td:last-child { font-weight: 700; color: var(--accent); }
tr.best td:last-child::after { content: "★"; } tr.tied td:last-child::after { content: "≈"; color: var(--soft); }
tr.best td:last-child::after, tr.tied td:last-child::after { position: absolute; left: calc(100% - 1.4rem); }
figure { margin: 1.2rem 0 2rem; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { max-width: 46rem; margin-top: .4rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem 2rem; }
pre { background: var(--tint); border: 1px solid var(--line); border-radius: 6px; padding: .9rem 1rem; overflow-x: auto;
  font: .8rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
"""


def write(demo: Demo, folder: Path) -> Path:
    """`report.html`, `results.json` and two of the plots in `folder`; returns the path of the report."""
    _replace(folder / "results.json", json.dumps(demo.as_dict(), indent=2, allow_nan=False) + "\n")
    _replace(folder / "cost.svg", plots.cost(demo.digits.results))
    _replace(folder / "bands.svg", plots.bands(demo.bands, demo.grid, demo.picture.train, demo.picture.test))
    return _replace(folder / "report.html", page(demo))


def page(demo: Demo) -> str:
    sections = [_head(demo), _digits(demo), _diabetes(demo), _picture(demo), _details(demo)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>propagauss demo</title><style>{_CSS}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


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
        f'<p class="soft">Method names: <em>{OURS}</em> is propagauss; <em>sampling</em> averages over '
        f"{demo.settings.samples} draws of the weights; <em>GLM</em> linearises the network in its weights. Where the "
        "best variants of two methods are compared, each is the best on the test part. ± is one standard error.</p>"
    )


def _digits(demo: Demo) -> str:
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
        f'<h2>Digits: classification</h2>{_about(study)}<p class="soft">The network was trained with light weight '
        f"decay (prior precision {demo.settings.digits_prior}), chosen for this demo because it leaves room for "
        f"improvement: a network that is not too sure of itself gains little from any posterior.</p>{_list(notes)}"
        f"{tables.to_html(study.results, tables.CLASSIFICATION)}{_legend()}"
        + _figure(
            plots.reliability(chosen, labels),
            f"Reliability, {plots.BINS} bins (Kronecker posterior, scale fitted, mean-field link). Calibrated "
            "predictions lie on the diagonal, up to chance: the grey bars are two standard errors for a bin of that "
            "size. Below: share of predictions by confidence, on a logarithmic scale.",
        )
        + '<div class="pair">'
        + _figure(
            plots.cost(study.results),
            "NLPD against time, scales fitted on the validation part. Hollow: probit link. Lower and further left is "
            "better.",
        )
        + _figure(
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
        f"<h2>Diabetes: regression</h2>{_about(study)}{_list(notes)}"
        f"{tables.to_html(study.results, tables.REGRESSION)}{_legend()}"
        '<p class="soft">Targets are standardised. At scale 1 the noise is that of largest marginal likelihood; '
        "otherwise scale and noise were fitted on the validation part, and so was the noise of MAP.</p>"
    )


def _picture(demo: Demo) -> str:
    sizes = demo.picture.sizes
    return (
        "<h2>A picture in one dimension</h2>"
        f"<p>Progress of diabetes from the body mass index alone: {sizes['train']} training and {sizes['validation']} "
        f"validation points, and {sizes['test']} points (hollow) that were kept from all methods to leave a gap. "
        "Sampling is the reference for what a posterior implies, however wide that is.</p>"
        + _list(commentary.spreads(demo.bands))
        + _figure(
            plots.bands(demo.bands, demo.grid, demo.picture.train, demo.picture.test),
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
        f"<code>print(net.plan)</code> shows it:</p><pre>{html.escape(demo.digits.plan)}</pre>"
        f'<p class="soft">{html.escape(versions)}; seed {demo.settings.seed}; one thread; {demo.elapsed:.0f} s. All '
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
    return f'<p class="soft">{html.escape(tables.describe(study.sizes, study.parameters, study.split.sizes))}.</p>'


def _legend() -> str:
    return (
        '<p class="soft">★ least NLPD; ≈ not told apart from it on these test points (less than two standard errors of '
        "the difference). Scale 1 is the posterior as it was fitted; every other scale is from the validation part.</p>"
    )


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def _figure(svg: str, caption: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _replace(path: Path, text: str) -> Path:
    """Write the file whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
