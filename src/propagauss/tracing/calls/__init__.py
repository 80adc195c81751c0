"""Calls of PyTorch that are replaced by plain ops while a model is traced."""
