"""Selective prediction: which predictions to leave to somebody else."""
