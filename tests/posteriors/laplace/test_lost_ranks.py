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


# way in which the last rank is lost -> structure of the fit, and after how many seconds at most the others notice
WAYS = {
    "killed": ("kronecker", 0.0),
    "interrupted": ("diagonal", 0.0),
    "stopped": ("full", TIMEOUT),
    "killed before the fit": ("diagonal", TIMEOUT),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int | None]]]:
    """What the ranks of each way have written, and how they ended; all at once, since they mostly wait."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    folders = {way: tmp_path_factory.mktemp("lost") for way in WAYS}
    groups = {
        way: [context.Process(target=work, args=(r, str(folders[way]), way, structure)) for r in range(RANKS)]
        for way, (structure, _) in WAYS.items()
    }
    every = [process for ranks in groups.values() for process in ranks]
    try:
        for process in every:
            process.start()
        for ranks in groups.values():
            for process in ranks[:-1]:
                process.join(120)
        return {way: (folders[way], [process.exitcode for process in ranks[:-1]]) for way, ranks in groups.items()}
    finally:
        for process in every:
            process.kill()
            process.join()


@pytest.mark.parametrize("way", WAYS)
def test_the_others_stop_in_time_and_can_start_again(way: str, ended: dict[str, tuple[Path, list[int | None]]]) -> None:
    (structure, limit), (folder, codes) = WAYS[way], ended[way]
    assert codes == [0] * (RANKS - 1)
    for rank in range(RANKS - 1):
        elapsed, message = folder.joinpath(f"{rank}.txt").read_text().split("\n", 1)
        assert float(elapsed) < limit + SLACK
        assert message.startswith(f"rank {rank} of {RANKS} lost touch with the others") and "start the fit" in message
    saved = {path.name for path in folder.iterdir() if "safetensors" in path.name}
    assert saved == {f"{rank}.safetensors" for rank in range(RANKS - 1)}
    expected = fit(0, 1, structure)
    for name in saved:
        found = load_posterior(folder / name)
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-5, atol=1e-6)
