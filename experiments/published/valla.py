"""Numbers of "Variational Linearized Laplace Approximation for Bayesian Deep Learning" (VaLLA), MLPs on two sets."""

from __future__ import annotations

SOURCE = "Ortega, Rodríguez Santana and Hernández-Lobato, Variational Linearized Laplace Approximation (VaLLA)"
ACCURACY = {"mnist": 0.976}  # of the network itself

# set -> method -> negative log-likelihood, expected calibration error, area under the ROC curve of the entropy
NUMBERS: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "MAP": {"nlpd": 0.0759, "ece": 0.0078, "entropy": 0.905},
        "LLA Kronecker": {"nlpd": 0.0945, "ece": 0.0286, "entropy": 0.949},
        "VaLLA": {"nlpd": 0.0752, "ece": 0.0108, "entropy": 0.921},
    },
    "fashion_mnist": {
        "MAP": {"nlpd": 0.3733, "ece": 0.0085, "entropy": 0.874},
        "LLA Kronecker": {"nlpd": 0.3767, "ece": 0.0139, "entropy": 0.932},
        "VaLLA": {"nlpd": 0.3519, "ece": 0.0126, "entropy": 0.933},
    },
}
