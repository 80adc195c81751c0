"""Local linearisation against moment matching, diagonal LA: the paper's table. Set -> method -> value."""

LABEL = "table:classification_moment_matching"

ACC = {
    "mnist": {"moments": 0.949, "linearise": 0.976},
    "fashion_mnist": {"moments": 0.876, "linearise": 0.878},
    "organcmnist": {"moments": 0.726, "linearise": 0.858},
    "organsmnist": {"moments": 0.604, "linearise": 0.712},
}
NLPD = {
    "mnist": {"moments": 0.867, "linearise": 0.095},
    "fashion_mnist": {"moments": 0.429, "linearise": 0.361},
    "organcmnist": {"moments": 0.920, "linearise": 0.515},
    "organsmnist": {"moments": 1.141, "linearise": 0.808},
}
ECE = {
    "mnist": {"moments": 0.498, "linearise": 0.027},
    "fashion_mnist": {"moments": 0.104, "linearise": 0.011},
    "organcmnist": {"moments": 0.190, "linearise": 0.099},
    "organsmnist": {"moments": 0.131, "linearise": 0.076},
}
