"""Ops without a rule of their own: pushed through by their derivatives."""
