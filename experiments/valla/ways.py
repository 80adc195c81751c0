"""Ways to predict, what they are called, and which are shown where."""

from __future__ import annotations

from dataclasses import dataclass

ML = "marginal likelihood"
CALIBRATIONS = ("as it is", "scale", "temperature", "calibrate")
BATCH = 100  # images at once, for which the cost is shown


@dataclass(frozen=True)
class Way:
    """Which row it is; the plain model has neither posterior nor engine."""

    posterior: str = ""
    prior: str = ""
    engine: str = ""
    link: str = "probit"
    calibration: str = "as it is"


ROTATED: tuple[Way, ...] = (  # drawn over angles
    Way(),
    Way(calibration="temperature"),
    Way("kronecker", ML, "streamlined", "probit", "calibrate"),
    Way("kronecker", ML, "linearised", "probit", "as it is"),
    Way("kronecker", ML, "linearised", "mean_field", "calibrate"),
    Way("last layer", ML, "linearised", "probit", "calibrate"),
)
MAIN: tuple[Way, ...] = (  # the table of the documentation
    Way(),
    Way(calibration="temperature"),
    Way("kronecker", ML, "linearised", "probit", "as it is"),
    Way("kronecker", "validation", "linearised", "probit", "as it is"),
    Way("kronecker", ML, "linearised", "probit", "scale"),
    Way("kronecker", ML, "streamlined", "probit", "calibrate"),
    Way("kronecker", ML, "linearised", "probit", "calibrate"),
    Way("kronecker", ML, "linearised", "mean_field", "calibrate"),
    Way("diagonal", ML, "linearised", "probit", "as it is"),
    Way("diagonal", ML, "linearised", "mean_field", "calibrate"),
    Way("last layer", ML, "linearised", "probit", "as it is"),
    Way("last layer", ML, "linearised", "mean_field", "calibrate"),
)
OWN_SCALE: tuple[Way, ...] = (  # what a fitted scale, and a temperature at the posterior's own scale, do
    Way(),
    Way(calibration="temperature"),
    Way("kronecker", ML, "streamlined", "probit", "scale"),
    Way("kronecker", ML, "linearised", "mean_field", "scale"),
    Way("kronecker", ML, "streamlined", "probit", "temperature"),
    Way("kronecker", ML, "linearised", "mean_field", "temperature"),
)
PUBLISHED = {Way(): "MAP", MAIN[2]: "LLA Kronecker"}


def title(way: Way) -> str:
    if not way.engine:
        return "temperature scaling" if way.calibration == "temperature" else "plain model"
    prior = "" if way.prior == ML else f", prior by {way.prior}"
    link = "" if way.link == "probit" else f", {way.link.replace('_', '-')}"
    what = {"as it is": "as it is", "scale": "`fit_scale`", "temperature": "temperature", "calibrate": "`calibrate`"}
    return f"{way.engine}, {way.posterior}{prior}{link}, {what[way.calibration]}"
