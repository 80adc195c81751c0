"""The paper's regression results: mean and standard deviation over five folds, and whether it prints them bold."""

from __future__ import annotations

Value = tuple[float, float, bool]
METHODS = ("MFVI sampling", "MFVI ours", "LA sampling", "LA GLM", "LA ours")


def _row(*values: Value) -> dict[str, Value]:
    return dict(zip(METHODS, values, strict=True))


NLPD: dict[str, dict[str, Value]] = {  # table:regression_nlpd
    "servo": _row(
        (1.287, 0.069, True), (1.136, 0.182, True), (3.795, 0.110, False), (1.047, 0.172, True), (1.443, 0.077, False)
    ),
    "ld": _row(
        (1.346, 0.280, True), (1.369, 0.440, True), (2.221, 0.110, False), (1.495, 0.580, True), (1.474, 0.648, True)
    ),
    "am": _row(
        (1.004, 0.052, False), (0.807, 0.087, True), (1.812, 0.065, False), (0.492, 0.279, True), (0.478, 0.309, True)
    ),
    "rev": _row(
        (1.076, 0.059, False), (0.925, 0.091, True), (1.932, 0.045, False), (0.859, 0.129, False), (0.833, 0.156, True)
    ),
    "ff": _row(
        (2.160, 3.003, True), (2.333, 3.671, True), (2.086, 0.292, False), (1.584, 0.950, True), (1.596, 1.217, True)
    ),
    "itt": _row(
        (0.937, 0.047, False), (0.841, 0.065, True), (1.681, 0.069, False), (0.825, 0.095, False), (0.756, 0.164, True)
    ),
    "ccs": _row(
        (0.939, 0.068, False), (0.828, 0.108, True), (1.612, 0.048, False), (0.319, 0.109, False), (0.234, 0.161, True)
    ),
    "asn": _row(
        (0.962, 0.054, False), (0.899, 0.065, True), (1.788, 0.045, False), (0.422, 0.109, False), (0.396, 0.133, True)
    ),
    "cac": _row(
        (0.973, 0.092, False), (0.920, 0.118, True), (1.848, 0.055, False), (1.281, 0.069, True), (2.662, 1.096, False)
    ),
    "pt": _row(
        (0.976, 0.069, False), (0.940, 0.074, True), (0.984, 0.101, False), (0.576, 0.181, True), (0.651, 0.306, False)
    ),
    "ccpp": _row(
        (0.365, 0.040, False), (0.352, 0.042, True), (1.345, 0.085, False), (-0.062, 0.182, True), (-0.062, 0.200, True)
    ),
}

RMSE: dict[str, dict[str, Value]] = {  # table:regression_rmse
    "servo": _row(
        (0.749, 0.147, False), (0.740, 0.143, True), (1.632, 0.233, False), (0.658, 0.141, True), (0.658, 0.141, True)
    ),
    "ld": _row(
        (0.884, 0.273, True), (0.881, 0.272, True), (0.989, 0.441, True), (0.977, 0.418, True), (0.977, 0.418, True)
    ),
    "am": _row(
        (0.415, 0.115, True), (0.417, 0.113, True), (0.505, 0.105, False), (0.371, 0.103, True), (0.371, 0.103, True)
    ),
    "rev": _row(
        (0.563, 0.096, True), (0.562, 0.095, True), (0.789, 0.130, False), (0.532, 0.104, True), (0.532, 0.104, True)
    ),
    "ff": _row(
        (0.874, 1.123, True), (0.874, 1.124, True), (0.910, 0.824, True), (0.852, 0.792, True), (0.852, 0.792, True)
    ),
    "itt": _row(
        (0.481, 0.057, True), (0.497, 0.066, True), (0.560, 0.075, False), (0.507, 0.072, True), (0.507, 0.072, True)
    ),
    "ccs": _row(
        (0.472, 0.102, True), (0.476, 0.106, True), (0.494, 0.102, False), (0.301, 0.057, True), (0.301, 0.057, True)
    ),
    "asn": _row(
        (0.568, 0.062, False), (0.560, 0.062, True), (0.550, 0.069, False), (0.352, 0.055, True), (0.352, 0.055, True)
    ),
    "cac": _row(
        (0.571, 0.105, True), (0.585, 0.092, False), (1.481, 0.167, False), (0.703, 0.101, True), (0.703, 0.101, True)
    ),
    "pt": _row(
        (0.601, 0.067, False), (0.590, 0.068, True), (0.479, 0.081, False), (0.410, 0.076, True), (0.410, 0.076, True)
    ),
    "ccpp": _row(
        (0.241, 0.038, True), (0.241, 0.038, True), (0.358, 0.041, False), (0.224, 0.037, True), (0.224, 0.037, True)
    ),
}
