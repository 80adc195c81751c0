"""Random models agree with the truth of either mode; `make referee` tries many more."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from referee.programs import Program, judge_program, programs
from referee.truth import STRUCTURES, Mode


@pytest.mark.parametrize("mode", ["full", "diagonal"])
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.sampled_from(STRUCTURES))
def test_random_model(mode: Mode, program: Program, structure: str) -> None:
    verdict = judge_program(program, mode, structure if mode == "full" else "diagonal")
    assert verdict.is_good, str(verdict)
