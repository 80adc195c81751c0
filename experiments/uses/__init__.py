"""`pg.tune` with its defaults for nine common uses, against the plain model."""
