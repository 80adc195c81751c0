"""Values whose variance nobody asks for: queries and keys of a fused projection, unless something else reads them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import propagauss as pg
from passes.test_attention_values import WIDTH, make, make_input, make_variances
from small_models import SEQUENCE, TINY, layer, model_of, small


def test_queries_and_keys_of_a_fused_projection_get_no_variance() -> None:
    module, x = make("GPT-2"), make_input(uncertain=True)
    for names in ((), ("c_attn.weight", "c_attn.bias")):
        posterior = pg.DiagonalPosterior(make_variances(module, names)) if names else None
        net = pg.streamline(module, posterior, x)
        assert f"variance of outputs {2 * WIDTH} to {3 * WIDTH - 1} only" in str(net.plan)


def test_parts_that_are_read_keep_their_variance() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3 * WIDTH).double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v = self.inner(x).chunk(3, dim=-1)
            return F.scaled_dot_product_attention(q, k, v), q

    module, x = Returned().eval(), make_input(uncertain=True)
    _, q = pg.streamline(module, None, x)(x)
    torch.testing.assert_close(q.variance, x.variance @ module.inner.weight[:WIDTH].square().mT)


def test_a_fused_projection_that_is_also_an_output() -> None:
    def attend(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = s.layer(x)
        q, k, v = a.chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v), a

    model = model_of(attend, layer=layer(4, 12))
    _, a = pg.streamline(model, small(model), SEQUENCE)(SEQUENCE)
    expected = TINY * (SEQUENCE.square().sum(-1, keepdim=True) + 1).expand(-1, -1, 12)
    torch.testing.assert_close(a.variance, expected)
