"""What three processes do in test_lost_ranks.py, of which the last one gets lost in the middle of a fit."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from posteriors.laplace.processes import POINTS, batches, data, network
from propagauss.errors import PropagaussError
from propagauss.posteriors import Posterior, fit_laplace

RANKS, TIMEOUT = 3, 8.0  # seconds


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    """As if the machine were gone: the connections stay, and nothing comes."""
    os.kill(os.getpid(), signal.SIGSTOP)


def interrupted() -> None:
    """The process lives on."""
    raise KeyboardInterrupt


WAYS = {f.__name__: f for f in (killed, stopped, interrupted)}


def part(rank: int, ranks: int, way: str = "") -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a rank; `way` is what happens after the first."""
    x, y = data("classification")
    for i, batch in enumerate(batches(x[rank::ranks], y[rank::ranks])):
        if i == 1 and way:
            time.sleep(0.2)
            WAYS[way]()
        yield batch


def fit(rank: int, ranks: int, structure: str, way: str = "") -> Posterior:
    loader = part(rank, ranks, way)
    return fit_laplace(network("mlp", 3), loader, structure=structure, distributed=ranks > 1)  # type: ignore[arg-type]


def join(folder: Path, store: str, rank: int, ranks: int, seconds: float = 120.0) -> None:
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{folder / store}", rank=rank, world_size=ranks, timeout=limit)


def work(rank: int, folder: str, way: str, structure: str) -> None:
    """A fit in which the last rank is lost; what the others say; and the fit again, without it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = Path(folder)
    lost = rank == RANKS - 1
    join(path, "store", rank, RANKS, TIMEOUT)
    dist.barrier()
    start = time.monotonic()
    try:
        if lost and way == "killed before the fit":
            killed()
        fit(rank, RANKS, structure, way if lost and way in WAYS else "").save(path / "never.safetensors")
    except PropagaussError as error:
        path.joinpath(f"{rank}.txt").write_text(f"{time.monotonic() - start}\n{error}")
    except KeyboardInterrupt:
        time.sleep(4 * TIMEOUT)
        return
    dist.destroy_process_group()
    join(path, "again", rank, RANKS - 1)
    fit(rank, RANKS - 1, structure).save(path / f"{rank}.safetensors")
    dist.destroy_process_group()


assert POINTS // RANKS > 2, "the last rank needs a second batch"
