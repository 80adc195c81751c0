"""Covariance of attention values against variances only: ViT-base on CIFAR-10, random attention layers."""

from __future__ import annotations

TABLES = {"nlpd": "table: vit_cov_nlpd", "accuracy": "table: vit_cov_acc", "ece": "table: vit_cov_ece"}
# posterior -> what is kept of the values -> metric -> value and standard error
CIFAR10: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    "MFVI": {
        "covariance": {"nlpd": (0.083, 0.005), "accuracy": (0.975, 0.002), "ece": (0.005, None)},
        "variance": {"nlpd": (0.083, 0.005), "accuracy": (0.975, 0.002), "ece": (0.004, None)},
    },
    "LA": {
        "covariance": {"nlpd": (0.087, 0.005), "accuracy": (0.974, 0.002), "ece": (0.007, None)},
        "variance": {"nlpd": (0.087, 0.005), "accuracy": (0.974, 0.002), "ece": (0.007, None)},
    },
}
