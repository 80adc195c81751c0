"""Shorter ways through the finished graph of a backward walk, where sensitivities are products of few factors."""
