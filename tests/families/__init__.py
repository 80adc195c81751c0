"""A survey of model families: which of them `propagauss` takes, and why the others fail (`python -m families`)."""
