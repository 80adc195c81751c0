"""Predictions on their way to disk: columns, part files and their manifest, the whole file in the end."""
