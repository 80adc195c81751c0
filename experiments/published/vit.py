"""ViT-base, pretrained on ImageNet-1k, with diagonal posteriors; numbers on CIFAR-10, the set that we have as well."""

from __future__ import annotations

Pair = tuple[float, float | None]  # value and standard error; the paper gives none of the ECE

# part -> label of the table, and (posterior, method) -> metric -> number
TABLES = {"attention": "tab:vit_attention", "mlp": "tab:vit_mlp", "head": "table:vit-last-layer"}
CIFAR10: dict[str, dict[tuple[str, str], dict[str, Pair]]] = {
    "attention": {
        ("LA", "sampling"): {"accuracy": (0.974, 0.002), "nlpd": (0.099, 0.008), "ece": (0.009, None)},
        ("LA", "GLM"): {"accuracy": (0.975, 0.002), "nlpd": (0.107, 0.008), "ece": (0.015, None)},
        ("LA", "ours"): {"accuracy": (0.974, 0.002), "nlpd": (0.087, 0.005), "ece": (0.007, None)},
        ("MFVI", "sampling"): {"accuracy": (0.975, 0.002), "nlpd": (0.134, 0.011), "ece": (0.016, None)},
        ("MFVI", "ours"): {"accuracy": (0.975, 0.002), "nlpd": (0.083, 0.005), "ece": (0.005, None)},
    },
    "mlp": {
        ("LA", "sampling"): {"accuracy": (0.964, 0.002), "nlpd": (0.194, 0.004), "ece": (0.086, None)},
        ("LA", "GLM"): {"accuracy": (0.975, 0.002), "nlpd": (0.092, 0.006), "ece": (0.007, None)},
        ("LA", "ours"): {"accuracy": (0.976, 0.002), "nlpd": (0.087, 0.005), "ece": (0.005, None)},
        ("MFVI", "sampling"): {"accuracy": (0.979, 0.001), "nlpd": (0.096, 0.008), "ece": (0.011, None)},
        ("MFVI", "ours"): {"accuracy": (0.979, 0.001), "nlpd": (0.073, 0.005), "ece": (0.004, None)},
    },
    "head": {
        ("LA", "sampling"): {"accuracy": (0.967, 0.002), "nlpd": (0.131, 0.004), "ece": (0.039, None)},
        ("LA", "GLM"): {"accuracy": (0.966, 0.002), "nlpd": (0.127, 0.004), "ece": (0.033, None)},
        ("LA", "ours"): {"accuracy": (0.967, 0.002), "nlpd": (0.106, 0.005), "ece": (0.007, None)},
    },
}
