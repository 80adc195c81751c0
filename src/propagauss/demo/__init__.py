"""`propagauss demo`: every way of predicting, side by side on real data. It needs the extra `demo`.

`data` and `training` make the networks, `classification` and `regression` compare the `methods`, `timing` says what
each costs, `compute` does all of that in order, and `run` shows it through `report`.
"""
