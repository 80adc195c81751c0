"""Predictions for a data set larger than memory, from an exported model: `predict(model, data, out)`."""

from propagauss.predict.job import predict
from propagauss.predict.options import Summary

__all__ = ["Summary", "predict"]
