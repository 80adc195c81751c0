"""Fit the few numbers that calibrate a predictive (scale, noise, temperature) by minimising the NLPD on held-out data.

Latents are computed once (held_out.py); everything after that is arithmetic on cached tensors.
"""

from propagauss.predictive.calibration.held_out import HeldOut, cache, check_finite, held_out, latents
from propagauss.predictive.calibration.largest_scale import COARSE, TOLERANCE, Calibration, calibrate, calibrated
from propagauss.predictive.calibration.report import BOUNDS, FitReport
from propagauss.predictive.calibration.scale import fit_scale
from propagauss.predictive.calibration.search import minimise
from propagauss.predictive.calibration.temperature import fit_temperature
from propagauss.predictive.calibration.trials import LOWEST, Trials, paired

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
