"""Experiments on real data; they need the extra `experiments` (scikit-learn, matplotlib).

`demo` is what `propagauss demo` runs: `data` and `training` make the networks, `classification` and `regression`
compare the `methods`, `timing` says what each costs, and `tables`, `plots`, `commentary` and `report` show it.
"""
