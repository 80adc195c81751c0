"""Facts about ops: what is stated holds, and rules of users may state them."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import propagauss as pg
from propagauss.rules.entries.aliases import _pairs
from propagauss.rules.facts import Facts, differentiable, facts, having, is_elementwise, state, stride_free
from propagauss.rules.kernels import Kernels
from propagauss.rules.registry import BUILDERS, FUNCTIONS

aten = torch.ops.aten
X = torch.arange(1.0, 25).reshape(2, 3, 4)
SQUARE = torch.arange(1.0, 17).reshape(4, 4)

# what ops take beside their first argument, where they need anything
REST: dict[Any, tuple[Any, ...]] = {
    aten.view.default: ([6, 4],),
    aten.reshape.default: ([6, 4],),
    aten._unsafe_view.default: ([6, 4],),
    aten.unflatten.int: (2, [2, 2]),
    aten.squeeze.dim: (0,),
    aten.squeeze.dims: ([0, 1],),
    aten.unsqueeze.default: (1,),
    aten.permute.default: ([2, 0, 1],),
    aten.transpose.int: (0, 1),
    aten.movedim.int: (0, 2),
    aten.movedim.intlist: ([0], [2]),
    aten.moveaxis.int: (0, 2),
    aten.moveaxis.intlist: ([0], [2]),
    aten.swapaxes.default: (0, 1),
    aten.swapdims.default: (0, 1),
    aten.narrow.default: (2, 1, 2),
    aten.select.int: (2, 1),
    aten.index_select.default: (2, torch.tensor([0, 2])),
    aten.index.Tensor: ([None, torch.tensor([0, 2])],),
    aten.gather.default: (2, torch.zeros(2, 3, 1, dtype=torch.long)),
    aten.expand.default: ([5, 2, 3, 4],),
    aten.expand_as.default: (torch.zeros(5, 2, 3, 4),),
    aten.view_as.default: (torch.zeros(6, 4),),
    aten.reshape_as.default: (torch.zeros(6, 4),),
    aten.broadcast_to.default: ([5, 2, 3, 4],),
    aten.repeat.default: ([2, 1, 1],),
    aten.repeat_interleave.self_int: (2,),
    aten.repeat_interleave.self_Tensor: (torch.tensor([1, 2]), 0),
    aten.tile.default: ([2],),
    aten.flip.default: ([0],),
    aten.rot90.default: (1, [0, 1]),
    aten.roll.default: ([1],),
    aten.unfold.default: (2, 2, 1),
    aten.take.default: (torch.tensor([0, 5]),),
    aten.take_along_dim.default: (torch.zeros(2, 3, 1, dtype=torch.long), 2),
    aten.dropout.default: (0.5, False),
    aten.feature_dropout.default: (0.5, False),
    aten.alpha_dropout.default: (0.5, False),
    aten.feature_alpha_dropout.default: (0.5, False),
    aten.split.Tensor: (1,),
    aten.split.sizes: ([1, 1],),
    aten.split_with_sizes.default: ([1, 1],),
    aten.chunk.default: (2,),
    aten.unsafe_split.Tensor: (1,),
    aten.unsafe_split_with_sizes.default: ([1, 1],),
    aten.unsafe_chunk.default: (2,),
    aten.tensor_split.sections: (2,),
    aten.tensor_split.indices: ([1],),
    aten.hsplit.int: (3,),
    aten.hsplit.array: ([1],),
    aten.vsplit.int: (2,),
    aten.vsplit.array: ([1],),
    aten.dsplit.int: (2,),
    aten.dsplit.array: ([1],),
    aten.to.dtype: (torch.float64,),
    aten.to.dtype_layout: (),
    aten.type_as.default: (torch.zeros(1, dtype=torch.float64),),
    operator.getitem: (1,),
}
MATRICES = {aten.t.default, aten.numpy_T.default, aten.matrix_H.default, aten.diag.default}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def names(fact: str) -> list[Any]:
    return sorted(having(fact), key=str)


def applied(op: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    x = (SQUARE if op in MATRICES else X).to(dtype)
    result = op(x, *REST.get(op, ()))
    return x, [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.filterwarnings("ignore:The use of `x.T`:UserWarning")
@pytest.mark.parametrize("op", names("moves_entries"), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.long], ids=str)
def test_moves_entries(op: Any, dtype: torch.dtype) -> None:
    x, results = applied(op, dtype)
    known = {0.0, *x.flatten().tolist()}  # some fill up with zeros
    assert all(set(r.flatten().tolist()) <= known and r.dtype == dtype for r in results)


@pytest.mark.parametrize("op", names("keeps_order") + names("casts"), ids=str)
def test_keeps_order(op: Any) -> None:
    x, (result,) = applied(op)
    assert result.flatten().tolist() == x.flatten().tolist()
    assert (result.dtype == x.dtype) == facts(op).keeps_order or op == aten.to.dtype_layout or "copy" in str(op)


@pytest.mark.parametrize("op", names("splits"), ids=str)
def test_splits_and_keeps_the_other_dimensions(op: Any) -> None:
    x, parts = applied(op)
    assert torch.equal(torch.cat(parts), x) and len(parts) == 2


@pytest.mark.parametrize("op", names("returns_input"), ids=str)
def test_returns_input_where_shape_and_type_stay(op: Any) -> None:
    rest = {
        aten.view.default: ([2, 3, 4],),
        aten.reshape.default: ([2, 3, 4],),
        aten._unsafe_view.default: ([2, 3, 4],),
    }
    rest |= {aten.expand.default: ([2, 3, 4],), aten.expand_as.default: (X,)}
    rest |= {aten.to.dtype: (torch.float32,), aten.type_as.default: (X,)}
    assert torch.equal(op(X, *rest.get(op, ())), X)


def test_linear_in_each_argument_alone() -> None:
    a, b, c = (numbers(4, 4, seed=i) for i in range(3))
    given: dict[Any, Callable[[Tensor], Any]] = {
        aten.einsum.default: lambda t: aten.einsum("ij,jk->ik", [t, b]),
        aten.mv.default: lambda t: aten.mv(t, b[0]),
        aten.dot.default: lambda t: aten.dot(t.flatten(), b.flatten()),
        aten.bmm.default: lambda t: aten.bmm(t[None], b[None]),
        aten.cumsum.default: lambda t: t.cumsum(0),
        aten.mean.dim: lambda t: aten.mean(t, [0]),
        aten.sum.dim_IntList: lambda t: aten.sum(t, [0]),
        aten.embedding.default: lambda t: aten.embedding(t, torch.tensor([0, 2])),
        aten.div.Scalar: lambda t: t / 3,
        aten.mul.Scalar: lambda t: t * 3,
        aten._fft_r2c.default: lambda t: aten._fft_r2c(t, [0], 0, True),
        aten._fft_c2c.default: lambda t: aten._fft_c2c(t + 0j, [0], 0, True),
        aten._fft_c2r.default: lambda t: aten._fft_c2r(t + 0j, [0], 0, 4),
        aten.imag.default: lambda t: aten.imag(t * 1j),
        aten.view_as_real.default: lambda t: aten.view_as_real(t + 0j),
    }
    for op in having("linear_in"):
        layer = facts(op).adds is not None
        if layer or not isinstance(op, torch._ops.OpOverload):
            continue
        two = facts(op).linear_in == (0, 1) or op == aten.div.Tensor
        function = given.get(op, (lambda t, op=op: op(t, b)) if two else op)
        torch.testing.assert_close(function(2 * a + c), 2 * function(a) + function(c))


def test_layers_are_linear_but_for_what_they_add() -> None:
    for op in having("adds"):
        known = facts(op)
        assert known.linear_in and known.adds == max(known.linear_in) + 1
        assert op._schema.arguments[known.adds].name == "bias"
        assert known.reads_weight and (op in BUILDERS or op in FUNCTIONS)


def test_positions_are_those_of_arguments() -> None:
    for fact in ("at_mean", "linear_in"):
        for op in having(fact):
            if isinstance(op, torch._ops.OpOverload):
                assert max(getattr(facts(op), fact)) < len(op._schema.arguments)
    for op in having("training_flag"):
        position, name = facts(op).training_flag or (0, "")
        assert op._schema.arguments[position].name == name


def test_other_names_have_the_same_arguments_and_rules() -> None:
    for alias, plain in _pairs().items():
        assert facts(alias).same_as is plain and facts(alias).at_mean == facts(plain).at_mean
        own, others = ([a.name for a in op._schema.arguments] for op in (alias, plain))
        assert len(own) == len(others) or alias == aten.special_round.default  # whose decimals are refused
        assert FUNCTIONS.get(alias) is FUNCTIONS.get(plain)


def test_replacements() -> None:
    assert stride_free(aten.view.default) is aten.reshape.default
    assert stride_free(aten.relu.default) is aten.relu.default
    assert differentiable(aten.view.default) is aten.reshape.default
    assert differentiable(aten.scaled_dot_product_attention.default).__name__ == "written_out"
    assert is_elementwise(aten.relu.default) and is_elementwise(aten.hardswish.default)
    assert not is_elementwise(aten.softmax.int) and not is_elementwise(operator.getitem)


def test_nothing_is_known_of_other_ops() -> None:
    assert facts(len) == facts(aten.bernoulli.default) == Facts()
    assert (
        not Facts().linear_at(0) and Facts(moves_entries=True).linear_at(0) and not Facts(linear_in=(1,)).linear_at(0)
    )


def test_facts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(pg.PropagaussError, match="'moves_entry'; did you mean 'moves_entries'"):
        pg.rule("mylib::turn", moves_entry=True)(lambda x: x)


@pytest.mark.parametrize("fact", ["elementwise", "keeps_order", "casts"])
def test_a_custom_op_is_no_part_of_an_elementwise_function(fact: str) -> None:
    """Its forward derivative would be zero, without a word."""
    with pytest.raises(pg.PropagaussError, match=rf"'{fact}' cannot be stated of mylib::bend"):
        state("mylib::bend", **{fact: True})


@torch.library.custom_op("propagauss_facts::turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    return x.flip(-1)


turn.register_fake(lambda x: torch.empty_like(x))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + 0.5 * turn(h)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_rule_of_a_user_may_state_facts() -> None:
    """With it, the covariance between an op's result and its argument is followed, though the op has no derivative."""
    model = Turned().double().eval()
    posterior = pg.DiagonalPosterior({n: torch.full_like(p, 0.1) for n, p in model.named_parameters()})
    x = numbers(4, 3)
    pg.rule("propagauss_facts::turn")(lambda h: h.mapped(turn(h.mean), lambda t: t.flip(-1)))
    with pytest.raises(pg.UnsupportedOpError):
        pg.streamline(model, posterior, x, covariance="full")
    pg.rule("propagauss_facts::turn", moves_entries=True)(lambda h: h.mapped(turn(h.mean), lambda t: t.flip(-1)))
    assert facts(torch.ops.propagauss_facts.turn.default).moves_entries
    latent = pg.streamline(model, posterior, x, covariance="full")(x)
    mix = torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64)
    own = 0.1 * (1 + x.square().sum(1))
    torch.testing.assert_close(latent.covariance, own[:, None, None] * (mix @ mix.mT))


def test_kernels_of_a_kind_or_of_its_base() -> None:
    table: Kernels[str] = Kernels()
    table.add("full", int)(lambda layer: "integer")
    table.add("full", bool)(lambda layer: None if layer == "large" else "truth")
    assert [table.of("full", bool, size) for size in ("small", "large")] == ["truth", "integer"]
    with pytest.raises(KeyError, match="no kernel for str with covariance='full'"):
        table.of("full", str, "small")
