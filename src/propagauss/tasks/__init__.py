"""What the one-pass predictive is good for: input sensitivity, outlier detection, and a look at where it fails."""

from propagauss.tasks import linearity, ood, selective, sensitivity
from propagauss.tasks.fidelity import fidelity

__all__ = ["fidelity", "linearity", "ood", "selective", "sensitivity"]
