"""How good predictions are, as `propagauss.metrics`: a few pure functions."""

from propagauss.predictive.metrics import (
    accuracy,
    auroc,
    brier,
    ece,
    nlpd,
    predictive_entropy,
    rmse,
)

__all__ = ["accuracy", "auroc", "brier", "ece", "nlpd", "predictive_entropy", "rmse"]
