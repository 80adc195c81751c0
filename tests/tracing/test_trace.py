"""From a model to its graph: what is written out, what is refused and how."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import propagauss as pg
from small_models import BOTH, F64, TINY, X, assert_mean, first_order, layer, model_of, small

# -- weights that the model standardises


class Standardised(nn.Conv2d):
    """As in timm: batch norm standardises every filter."""

    def __init__(self, *sizes: int, gain: bool):
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.rand(self.out_channels) + 0.5) if gain else None

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = None if self.gain is None else (self.gain * 0.7).view(-1)
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-3)
        return F.conv2d(input, weight.reshape(self.weight.shape), self.bias)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("gain", [False, True])
def test_standardised_filters(gain: bool, inplace: bool) -> None:
    """The batch norm of a weight mixes no samples."""
    model = nn.Sequential(Standardised(3, 4, 3, gain=gain), nn.ReLU(inplace), nn.Flatten(), layer(36, 2)).to(F64).eval()
    x = torch.randn(2, 3, 5, 5, dtype=F64)
    posterior = pg.DiagonalPosterior({"3.weight": torch.full((2, 36), TINY, dtype=F64)})
    g = pg.streamline(model, posterior, x)(x)
    torch.testing.assert_close(g.mean, model(x).detach())
    assert (g.variance > 0).all()


# -- sizes that depend on values


MASK = torch.tensor([True, False, True, False])
MASKED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "buffer": lambda s, x: s.head(s.layer(x)[:, s.mask]),
    "inverted": lambda s, x: s.head(s.layer(x)[:, ~s.mask]),
    "two dimensions": lambda s, x: s.head(s.layer(x).reshape(-1, 2, 2)[:, s.mask.reshape(2, 2)]),
    "made on the way": lambda s, x: s.head(s.layer(x)[:, torch.arange(4) < 2]),
    "its indices": lambda s, x: s.head(s.layer(x)[:, s.mask.nonzero().squeeze(-1)]),
    "sum of what is left": lambda s, x: s.layer(x)[:, s.mask].sum(-1, keepdim=True),
}


@BOTH
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_is_a_constant(name: str, covariance: Any) -> None:
    model = model_of(MASKED[name], layer=layer(), head=layer(2, 3), mask=MASK)
    if name == "sum of what is left":
        model.head = nn.Identity()
    g = assert_mean(model, X, covariance=covariance)
    torch.testing.assert_close(g.mean[:1], pg.streamline(model, small(model), X)(X[:1]).mean)
    if covariance == "full":
        torch.testing.assert_close(g.variance.sqrt(), first_order(model, X), rtol=1e-6, atol=0)


DATA_DEPENDENT: dict[str, tuple[str, Callable[[Any, Tensor], Tensor]]] = {
    "mask": ("aten.index.Tensor", lambda s, x: (h := s.layer(x))[h > 0]),
    "routing": ("aten.nonzero", lambda s, x: s.expert((h := s.layer(x))[torch.nonzero(h[:, 0] > 0).squeeze(-1)])),
}


@BOTH
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_sizes_that_the_data_decide_are_refused_by_name(name: str, covariance: Any) -> None:
    op, function = DATA_DEPENDENT[name]
    parts = {"layer": layer()} | ({"expert": layer()} if name == "routing" else {})
    model = nn.Sequential(nn.Identity(), model_of(function, **parts)).eval()
    with pytest.raises(pg.PropagaussError, match=rf"(?s){op} at '1'.*size depends on the values.*torch\.where"):
        pg.streamline(model, small(model), X, covariance=covariance)


def test_sizes_that_the_data_decide_before_anything_is_uncertain() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        chosen = torch.nonzero(x[:, 0] > 0).squeeze(-1)
        return s.layer(torch.zeros_like(x).index_add(0, chosen, 2 * x[chosen]))

    assert_mean(model_of(forward, layer=layer()), X)


# -- settings inside the model


def test_autocast_that_is_switched_off() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.layer(x)
        with torch.autocast("cpu", enabled=False):
            y = h.double() * 2
            with torch.enable_grad():
                y = y + s.layer(h).relu_()
        return y * h

    assert_mean(model_of(forward, layer=layer()), X)


def test_autocast_as_the_last_thing() -> None:
    def forward(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = s.layer(x)
        with torch.autocast("cpu", enabled=False):
            y = h.double().relu_()
        return y, h

    model = model_of(forward, layer=layer())
    for g, expected in zip(pg.streamline(model, small(model), X)(X), model(X), strict=True):
        torch.testing.assert_close(g.mean, expected.detach())


def test_autocast_that_is_switched_on_is_refused() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return s.layer(x)

    model = model_of(forward, layer=layer())
    with pytest.raises(pg.InputError, match=r"autocast on for cpu at 'layer'.*around the streamlined network"):
        pg.streamline(model, small(model), X)


# -- what torch.export cannot do


UNTRACEABLE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "branch": lambda s, x: s.layer(x) if x.sum() > 0 else x,
    "numpy": lambda s, x: s.layer(torch.from_numpy(x.numpy() + 1)),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_torch_export_is_named_when_it_fails(name: str) -> None:
    model = model_of(UNTRACEABLE[name], layer=layer())
    with pytest.raises(pg.InputError, match=r"(?s)^torch\.export could not trace.*wrap the model.*use_cache=False"):
        pg.streamline(model, small(model), X)


def test_a_missing_output_is_the_whole_message() -> None:
    model = model_of(lambda s, x: {"scores": s.layer(x)}, layer=layer())
    with pytest.raises(pg.InputError, match=r"^the model returns a dict of 1, which has no 'logits': name .* output=$"):
        pg.streamline(model, small(model), X, output="logits")


def test_a_model_in_training_mode_is_not_run_to_see_what_is_wrong() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("never works") if type(x.shape[0]) is not int else ValueError(self.norm(x))

    model = Fixed().train()
    with pytest.raises(pg.InputError, match=r"'norm' is in training mode"):
        pg.streamline(model, small(model), X.float())
    assert model.norm.num_batches_tracked == 0


def test_two_unread_values_of_which_one_reads_the_other() -> None:
    """What is removed together with its reader must not be removed again."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            part = h[:, :2]
            empty = torch.cat([part[:, :0], part * 0], -1)[:, :0]
            return torch.cat([h, empty], -1)

    model = Sliced().eval()
    x = torch.randn(3, 4)
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 1e-2) for n, p in model.named_parameters()})
    torch.testing.assert_close(pg.streamline(model, posterior, x)(x).mean, model(x))
