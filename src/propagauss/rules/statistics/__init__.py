"""Sums, norms and normalisation over some dimensions."""
