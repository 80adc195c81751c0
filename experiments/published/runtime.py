"""Milliseconds for one data point on an NVIDIA H100: ViT-base on CIFAR-10, the 784-128-64-10 MLP on MNIST."""

from __future__ import annotations

# label of the table -> method -> mean and standard deviation; sampling takes 50 (ViT) or 1,000 (MLP) draws
TABLES: dict[str, dict[str, tuple[float, float]]] = {
    "tab:runtime, ViT": {
        "MAP": (3.737, 0.093),
        "LA sampling": (190.806, 0.137),
        "LA GLM": (17.191, 0.734),
        "MFVI sampling": (207.854, 0.307),
        "ours, value covariance": (14.728, 0.144),
        "ours": (4.350, 0.079),
    },
    "tab:runtime, MLP": {
        "MAP": (0.069, 0.001),
        "LA sampling": (98.584, 3.737),
        "LA GLM": (1.656, 0.049),
        "MFVI sampling": (190.302, 0.466),
        "ours": (0.542, 0.073),
    },
    "table:wall-clock-last-layer": {
        "MAP": (3.732, 0.091),
        "LA sampling": (188.732, 0.051),
        "LA GLM": (5.517, 0.033),
        "ours": (3.782, 0.088),
    },
}
