"""Fit the few numbers that calibrate a predictive (scale, noise, temperature) by minimising the NLPD on held-out data.

Latents are computed once (held_out.py); everything after that is arithmetic on cached tensors.
"""

from propagauss.predictive.calibration.held_out import (
    BOUNDS,
    FitReport,
    HeldOut,
    cache,
    check_finite,
    fit_scale,
    fit_temperature,
    held_out,
    latents,
    minimise,
)
from propagauss.predictive.calibration.largest_scale import (
    COARSE,
    LOWEST,
    TOLERANCE,
    Calibration,
    Trials,
    calibrate,
    calibrated,
    paired,
)

__all__ = [
    "BOUNDS",
    "COARSE",
    "LOWEST",
    "TOLERANCE",
    "Calibration",
    "FitReport",
    "HeldOut",
    "Trials",
    "cache",
    "calibrate",
    "calibrated",
    "check_finite",
    "fit_scale",
    "fit_temperature",
    "held_out",
    "latents",
    "minimise",
    "paired",
]
