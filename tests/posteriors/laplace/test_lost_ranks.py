"""A rank is lost in the middle of a distributed fit: the others say so in time, write nothing and can start again."""

import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from posteriors.laplace.lost_ranks import RANKS, TIMEOUT, fit, work
from posteriors.laplace.processes import PRELOADED
from propagauss.posteriors import load_posterior

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
SLACK = 20.0  # seconds, on a machine with other work


@pytest.mark.parametrize(
    "way, structure, limit",
    [
        ("killed", "kronecker", 0.0),
        ("interrupted", "diagonal", 0.0),
        ("stopped", "full", TIMEOUT),
        ("killed before the fit", "diagonal", TIMEOUT),
    ],
)
def test_the_others_stop_in_time_and_can_start_again(way: str, structure: str, limit: float, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [context.Process(target=work, args=(r, str(tmp_path), way, structure)) for r in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        for process in ranks[:-1]:
            process.join(120)
        assert [process.exitcode for process in ranks[:-1]] == [0] * (RANKS - 1)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for rank in range(RANKS - 1):
        elapsed, message = tmp_path.joinpath(f"{rank}.txt").read_text().split("\n", 1)
        assert float(elapsed) < limit + SLACK
        assert message.startswith(f"rank {rank} of {RANKS} lost touch with the others") and "start the fit" in message
    saved = {path.name for path in tmp_path.iterdir() if "safetensors" in path.name}
    assert saved == {f"{rank}.safetensors" for rank in range(RANKS - 1)}
    expected = fit(0, 1, structure)
    for name in saved:
        found = load_posterior(tmp_path / name)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-5, atol=1e-6)
