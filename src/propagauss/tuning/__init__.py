"""`pg.tune`: which way to predict is best for a model and its data, found on held-out data.

`groups` says which parameters may be random, `candidates` what is tried with them, `judge` how well it does on folds of
the validation data and `cost` what it takes; `leaderboard` shows it, and `tune` does all of that in order.
"""
