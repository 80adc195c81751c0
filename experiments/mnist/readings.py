"""What the records of `mnist` show, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.frame.experiment import Record
from experiments.mnist import training as mnist_training
from experiments.published import mnist as published

TITLES = {
    "mnist": "MNIST",
    "fashion_mnist": "Fashion-MNIST",
    "pneumoniamnist": "PneumoniaMNIST",
    "organcmnist": "OrganCMNIST",
    "organsmnist": "OrganSMNIST",
}
# what has to hold for LA on these sets: NLPD of ours minus that of each baseline at most this, and its ECE
REQUIRED = {
    "mnist": {"GLM": 0.0, "sampling": 0.003, "ece": 0.006},
    "fashion_mnist": {"GLM": 0.0, "sampling": 0.0, "ece": 0.01},
}
VARIANTS = {"": "", " scale fitted": ", its scale fitted too", " prior tuned": ", its prior tuned on validation images"}
OURS = "LA ours probit exact"


class Rows:
    """The rows of one record, by name."""

    def __init__(self, record: Record):
        self.record = record
        self._rows: dict[str, dict[str, Any]] = {row["key"]: row for row in record["rows"]}
        self._gaps = {(d["one"], d["other"]): d for d in record["differences"]}

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._rows[name]

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows.values())

    def gap(self, one: str, other: str) -> tuple[float, float]:
        """Difference in NLPD, and the standard error of that paired difference."""
        found = self._gaps[one, other]
        return found["mean"], found["error"]

    def nlpd(self, name: str) -> str:
        return f"{self._rows[name]['nlpd']:.4f}"


def readings(records: Mapping[str, Record]) -> list[str]:
    found = []
    for name in (n for n in TITLES if n in records):
        rows, title = Rows(records[name]), TITLES[name]
        if name in REQUIRED:
            found += _required(rows, name, title)
            if name + mnist_training.SUFFIX in records:
                record = records[name + mnist_training.SUFFIX]
                found.append(mnist_training.reading(title, record, REQUIRED[name]["ece"]))
        found += [_prior(rows, title), _choices(rows, title), _plain(rows, title), _mean_field(rows, title)]
    return found


def _required(rows: Rows, name: str, title: str) -> list[str]:
    """Whether ours does as well against the baselines as it has to: against each as the paper uses it, and tuned."""
    paper, limits, found = published.NLPD[name], REQUIRED[name], []
    for method in ("GLM", "sampling"):
        parts = []
        for ending, words in VARIANTS.items():
            other = f"LA {method}{_link(method)}{ending}"
            gap, error = rows.gap(OURS, other)
            holds = "holds" if gap <= limits[method] else f"does not hold, off by {gap - limits[method]:.4f}"
            parts.append(f"{rows.nlpd(other)}{words} ({holds}; difference {gap:+.4f} ± {error:.4f})")
        allowed = f"{limits[method]:.3f} above" if limits[method] else "that of"
        found.append(
            f"LA on {title}: NLPD of ours {rows.nlpd(OURS)} (paper {paper['LA ours'][0]}), to be at most {allowed} "
            f"{method} (paper {paper[f'LA {method}'][0]}), which is {'; '.join(parts)}."
        )
    ece, floor = rows[OURS]["ece"], rows[OURS]["ece_floor"]
    found.append(
        f"LA on {title}: ECE of ours {ece:.4f} (paper {published.ECE[name]['LA ours'][0]}), to be at most "
        f"{limits['ece']}: {'holds' if ece <= limits['ece'] else 'does not hold'}. Labels drawn from its own "
        f"predictions give {floor:.4f} on average: what chance and binning alone make of it."
    )
    return found


def _prior(rows: Rows, title: str) -> str:
    """How each method depends on the prior precision, which the paper does not state."""
    sweep = rows.record["sweep"]
    spans = {}
    for way in ("sampling", "GLM", "ours"):
        values = [entry[way]["test"] for entry in sweep]
        spans[way] = f"{min(values):.3f} to {max(values):.3f}"
    low, high = sweep[0]["prior_precision"], sweep[-1]["prior_precision"]
    chosen = {way: min(sweep, key=lambda e: e[way]["validation"])["prior_precision"] for way in ("sampling", "GLM")}
    return (
        f"{title}, prior precision: the marginal likelihood chooses {rows.record['prior_precision']:.3g}, with which "
        f"sampling and GLM as they are have NLPD {rows.nlpd('LA sampling')} and {rows.nlpd('LA GLM probit')}; "
        f"validation images choose {chosen['sampling']:.3g} and {chosen['GLM']:.3g}, with "
        f"{rows.nlpd('LA sampling prior tuned')} and {rows.nlpd('LA GLM probit prior tuned')}. From {low:.2g} to "
        f"{high:.2g} the NLPD goes over {spans['sampling']} for sampling, {spans['GLM']} for GLM and {spans['ours']} "
        "for ours with its fitted scale."
    )


def _choices(rows: Rows, title: str) -> str:
    """Links, Kronecker forms and covariance structures of ours."""
    links = [OURS.replace("probit", link) for link in ("probit", "mean_field", "monte_carlo", "bridge")]
    values = ", ".join(f"{rows[n]['link'].replace('_', '-')} {rows.nlpd(n)}" for n in links if n in rows)
    factored = rows["LA ours probit factored"]
    return (
        f"{title}, LA ours: by link {values}. With the paper's factored form {factored['nlpd']:.4f} (scale "
        f"{factored['scale']:.2g}; exact: {rows[OURS]['scale']:.2g}), with variances only "
        f"{rows.nlpd('LA ours probit exact, variances only')}; as it is, without a fitted scale, "
        f"{rows.nlpd(OURS + ' as it is')}."
    )


def _plain(rows: Rows, title: str) -> str:
    """Against one number on the logits."""
    gap, error = rows.gap(OURS, "temperature scaling")
    return (
        f"{title}: MAP {rows.nlpd('MAP')}, temperature scaling {rows.nlpd('temperature scaling')}, LA ours "
        f"{rows.nlpd(OURS)}; ours minus temperature scaling {gap:+.4f} ± {error:.4f}: {verdict(gap, error)}."
    )


def _mean_field(rows: Rows, title: str) -> str:
    gap, error = rows.gap("MFVI ours probit", "MFVI sampling")
    return (
        f"MFVI on {title}: sampling {rows.nlpd('MFVI sampling')} ({rows.nlpd('MFVI sampling scale fitted')} with its "
        f"scale fitted), ours {rows.nlpd('MFVI ours probit')}, the mean weights alone "
        f"{rows.nlpd('MFVI mean weights')}; ours minus sampling {gap:+.4f} ± {error:.4f}: {verdict(gap, error)}."
    )


def verdict(gap: float, error: float, who: str = "ours") -> str:
    """What a difference in NLPD says, given its standard error."""
    return "a tie" if abs(gap) < 2 * error else f"{who} is {'better' if gap < 0 else 'worse'}"


def _link(method: str) -> str:
    return " probit" if method == "GLM" else ""
