"""Exported predictors read back from their files."""
