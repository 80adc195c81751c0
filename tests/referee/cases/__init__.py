"""The battery: every case, in the order of the table."""

from referee.cases.aliases import ALIASES
from referee.cases.attention import ATTENTION
from referee.cases.elementwise import ELEMENTWISE
from referee.cases.joins import JOINS
from referee.cases.layers import LAYERS
from referee.cases.linear import LINEAR
from referee.cases.ops import OPS

__all__ = ["BATTERY"]

BATTERY = [*LINEAR, *LAYERS, *OPS, *ATTENTION, *JOINS, *ALIASES, *ELEMENTWISE]
