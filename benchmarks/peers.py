"""The libraries we compare with, called as their documentation says, on a model of their own (some change it)."""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
import types
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.case import Predict, SkipMethod

# -- laplace-torch


def laplace(model: nn.Module, data: tuple[Tensor, Tensor], structure: Literal["diag", "kron", "full"]) -> Any:
    """A fitted laplace-torch object over all weights."""
    try:
        from laplace import Laplace
    except ImportError as error:
        raise SkipMethod(f"laplace-torch is not installed ({error})") from error
    la = Laplace(copy.deepcopy(model), "classification", subset_of_weights="all", hessian_structure=structure)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(DataLoader(TensorDataset(*data), batch_size=64))
    return la


def laplace_glm(la: Any) -> Predict:
    """Mean and covariance of the latent, before any link: what the streamlined network returns."""
    return la._glm_predictive_distribution


def laplace_samples(la: Any, samples: int) -> Predict:
    return lambda x: la.predictive_samples(x, pred_type="nn", n_samples=samples)


# -- suq


def suq_diagonal(model: nn.Module, variances: Tensor) -> Predict:
    """`SUQ_MLP_Diag.forward_latent`; `variances` in the order of `model.parameters()`."""
    module = _import_suq("suq.diag_suq_mlp")
    return module.SUQ_MLP_Diag(copy.deepcopy(model), variances, "classification").forward_latent


def suq_kronecker(model: nn.Module, la: Any) -> Predict:
    """The layers of `SUQ_MLP_Kron`, one after the other.

    Its own `forward_latent` drops the covariance that each layer returns, and crashes on the one that it is then left
    with; the loop here passes it on.
    """
    suq = _import_suq("suq")
    names = [info.name for info in pkgutil.iter_modules(suq.__path__)]
    modules = [_import_suq(f"suq.{name}") for name in names if "mlp" in name.lower()]
    found = next((m.SUQ_MLP_Kron for m in modules if hasattr(m, "SUQ_MLP_Kron")), None)
    if found is None:
        raise SkipMethod("the published suq has no Kronecker layers")
    net = found(copy.deepcopy(model), la.H.eigenvectors, la.H.eigenvalues, "classification", prior_precision=1.0)

    def predict(x: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, covariance = x, None
        for layer in net.model:
            mean, covariance = layer(mean, covariance)
        return mean, covariance

    return predict


def _import_suq(name: str) -> types.ModuleType:
    try:
        importlib.import_module("suq.utils.utils")
    except ImportError:
        # suq 0.1.0 was published without its package suq.utils, of which it needs one name to be importable
        stub = types.ModuleType("suq.utils.utils")
        stub.torch_dataset = None  # type: ignore[attr-defined]
        sys.modules.setdefault("suq.utils", types.ModuleType("suq.utils"))
        sys.modules["suq.utils.utils"] = stub
        for partial in [n for n in sys.modules if n == "suq" or (n.startswith("suq.") and "utils" not in n)]:
            del sys.modules[partial]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SkipMethod(f"suq is not installed ({error})") from error
