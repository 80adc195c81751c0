"""What streamlined prediction is compared with, as `propagauss.baselines`."""

from propagauss.predictive.baselines import (
    GLM,
    MAP,
    MonteCarlo,
    TemperatureScaling,
)

__all__ = ["GLM", "MAP", "MonteCarlo", "TemperatureScaling"]
