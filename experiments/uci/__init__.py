"""Regression on eleven UCI sets."""
