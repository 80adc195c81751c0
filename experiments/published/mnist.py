"""MNIST-like classification with a 784-128-64-C network: the paper's table of LA (Kronecker) and MFVI."""

LABEL = "table:classification_mlp"

# set -> method -> (value, whether it is bold there)
ACC = {
    "mnist": {
        "LA sampling": (0.982, True),
        "LA GLM": (0.980, False),
        "LA ours": (0.980, False),
        "MFVI sampling": (0.981, True),
        "MFVI ours": (0.980, False),
    },
    "fashion_mnist": {
        "LA sampling": (0.888, True),
        "LA GLM": (0.886, True),
        "LA ours": (0.884, False),
        "MFVI sampling": (0.890, True),
        "MFVI ours": (0.891, True),
    },
    "organcmnist": {
        "LA sampling": (0.758, True),
        "LA GLM": (0.750, False),
        "LA ours": (0.752, False),
        "MFVI sampling": (0.751, False),
        "MFVI ours": (0.751, False),
    },
    "organsmnist": {
        "LA sampling": (0.590, True),
        "LA GLM": (0.580, False),
        "LA ours": (0.579, False),
        "MFVI sampling": (0.592, True),
        "MFVI ours": (0.574, False),
    },
}
NLPD = {
    "mnist": {
        "LA sampling": (0.061, True),
        "LA GLM": (0.065, False),
        "LA ours": (0.063, False),
        "MFVI sampling": (0.062, True),
        "MFVI ours": (0.062, True),
    },
    "fashion_mnist": {
        "LA sampling": (0.369, False),
        "LA GLM": (0.367, False),
        "LA ours": (0.331, True),
        "MFVI sampling": (0.311, True),
        "MFVI ours": (0.313, True),
    },
    "organcmnist": {
        "LA sampling": (1.089, False),
        "LA GLM": (1.052, False),
        "LA ours": (0.793, True),
        "MFVI sampling": (0.797, True),
        "MFVI ours": (0.796, True),
    },
    "organsmnist": {
        "LA sampling": (1.403, False),
        "LA GLM": (1.498, False),
        "LA ours": (1.277, True),
        "MFVI sampling": (1.182, True),
        "MFVI ours": (1.226, False),
    },
}
ECE = {
    "mnist": {
        "LA sampling": (0.004, False),
        "LA GLM": (0.005, False),
        "LA ours": (0.003, True),
        "MFVI sampling": (0.004, False),
        "MFVI ours": (0.003, True),
    },
    "fashion_mnist": {
        "LA sampling": (0.038, False),
        "LA GLM": (0.043, False),
        "LA ours": (0.006, True),
        "MFVI sampling": (0.010, True),
        "MFVI ours": (0.013, False),
    },
    "organcmnist": {
        "LA sampling": (0.101, False),
        "LA GLM": (0.130, False),
        "LA ours": (0.024, True),
        "MFVI sampling": (0.023, False),
        "MFVI ours": (0.020, True),
    },
    "organsmnist": {
        "LA sampling": (0.100, False),
        "LA GLM": (0.189, False),
        "LA ours": (0.095, True),
        "MFVI sampling": (0.052, True),
        "MFVI ours": (0.075, False),
    },
}
