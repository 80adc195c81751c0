"""The experiments of the paper "Streamlining Prediction in Bayesian Deep Learning": `python -m experiments NAME`.

They are no part of the installed package: run them from the root of the repository. An experiment is a module that
offers `EXPERIMENT`, in the folder of its subject; its line in `frame.names.NAMES` makes it known.

- `uci`, `mnist`, `transformers`: regression, image and language experiments, each with its data, networks and readings;
- `uses`: `pg.tune` on nine common uses; `tasks`: outliers, sensitivity maps, calibration;
- `cost`: number of samples and running times;
- `methods`: ways to predict that several of them compare; `datasets`: the folder of the data;
- `frame`: what an experiment is, running it, keeping what it found; `report`: the page made from that;
- `published`: the paper's own numbers.
"""
