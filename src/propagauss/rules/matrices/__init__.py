"""Sums of products: linear layers, matrix products, contractions, attention, distances."""
