"""A torch.export archive (`.pt2`) written and read such that no file can run code: `write` and `load`."""

from propagauss.predictive.archive.files import Loaded, load, write

__all__ = ["Loaded", "load", "write"]
