"""Which rows of a value belong to which sample, and whether samples keep to themselves."""
