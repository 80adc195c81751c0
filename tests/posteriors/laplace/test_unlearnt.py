"""Parameters that no derivative of the output reaches keep the prior's variance, and the fit says so."""

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from posteriors.laplace.models import loader, targets
from propagauss.posteriors import fit_laplace

STRUCTURES = ["diagonal", "kronecker", "full"]


class Features(nn.Module):
    """Behind each way to stop gradients a layer, one that has no effect, one that learns, and dead units."""

    def __init__(self) -> None:
        super().__init__()
        self.no_grad, self.detached, self.data, self.spare = (nn.Linear(4, 4) for _ in range(4))
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        with torch.no_grad():
            self.body.bias[0] = -100.0  # a unit that ReLU never lets through

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.no_grad(x)
        h = h + self.detached(x).detach() + nn.functional.linear(x, self.data.weight.data, self.data.bias.data)
        self.spare(x)
        return self.head(self.body(torch.tanh(h)).relu())


def fit(structure: str, count: int = 6, **options) -> list[str]:
    """What is said of parameters that are left to the prior."""
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        data = loader(torch.randn(count, 4), targets("classification", count), count)
        fit_laplace(Features().eval(), data, structure=structure, prior_precision=0.7, **options)  # type: ignore[arg-type]
    return [str(w.message) for w in found if "say nothing" in str(w.message)]


# few points leave the full curvature as its rows, many as a matrix
@pytest.mark.parametrize(("structure", "count"), [("diagonal", 6), ("kronecker", 6), ("full", 6), ("full", 60)])
def test_one_warning_names_them_and_the_remedy(structure: str, count: int) -> None:
    (message,) = fit(structure, count)
    named = re.split(", ", message.split("about ")[1].split(":")[0])
    layers = ["no_grad", "detached", "spare"] if structure == "kronecker" else ["no_grad", "detached", "data", "spare"]
    assert named == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
    assert "leave them out with parameters=, or freeze them with requires_grad_(False)" in message


@pytest.mark.parametrize("structure", STRUCTURES)
def test_dead_units_and_what_is_left_out_are_no_reason(structure: str) -> None:
    assert fit(structure, parameters=["body.*", "head.*"]) == []
