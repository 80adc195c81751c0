"""Trained networks against 10,000 samples of their weights: the tables of docs/fidelity.md."""
