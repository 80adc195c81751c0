"""Moments of elementwise functions without a closed form: rules for kinds of functions, and panels for any other."""
