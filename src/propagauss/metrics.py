"""How good predictions are, as `propagauss.metrics`: a few pure functions."""

from propagauss.predictive.metrics import (
    RiskCoverage,
    accuracy,
    aurc,
    auroc,
    brier,
    coverage_at_risk,
    ece,
    nlpd,
    predictive_entropy,
    risk_coverage,
    rmse,
)

__all__ = [
    "RiskCoverage",
    "accuracy",
    "aurc",
    "auroc",
    "brier",
    "coverage_at_risk",
    "ece",
    "nlpd",
    "predictive_entropy",
    "risk_coverage",
    "rmse",
]
