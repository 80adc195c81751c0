"""The experiments of the paper "Streamlining Prediction in Bayesian Deep Learning", one module each.

A module offers `EXPERIMENT`; its line in `names.NAMES` makes it known to `propagauss reproduce`.
"""
