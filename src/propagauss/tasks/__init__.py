"""What the one-pass predictive is good for: input sensitivity, outlier detection, and a look at where it fails."""

from propagauss.tasks import linearity, ood, sensitivity

__all__ = ["linearity", "ood", "sensitivity"]
