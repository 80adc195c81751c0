"""fit_laplace shared by the processes of torch.distributed: two of them, over gloo, against one with all the data."""

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from posteriors.laplace.processes import CASES, FAILURES, PRELOADED, batches, data, network, warned, work
from propagauss.errors import InputError
from propagauss.posteriors import fit_laplace, load_posterior

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that two ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.set_forkserver_preload(PRELOADED)
    mp.start_processes(work, (str(folder),), nprocs=2, start_method="forkserver")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_the_posterior_of_all_the_data(results: Path, name: str) -> None:
    expected, said = warned(name, None)
    assert [len(said), "features.weight, features.bias:" in "".join(said)] == [name.startswith("untrained")] * 2
    precise = expected.dtype == torch.float64 and not name.startswith("chosen")
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if precise else {"rtol": 1e-5, "atol": 1e-6}
    found = [load_posterior(results / f"{name} on {rank}.safetensors") for rank in (0, 1)]
    for posterior in found:
        assert posterior.names == expected.names
        torch.testing.assert_close(posterior.to_dense(), expected.to_dense(), **tolerance)
        assert posterior.details == pytest.approx(expected.details, rel=tolerance["rtol"])
    for rank in (0, 1):
        assert json.loads((results / f"{rank}.json").read_text())[name] == said
    assert found[0].details == found[1].details
    assert torch.equal(found[0].to_dense(), found[1].to_dense())


MESSAGES = {  # on rank 0 and on rank 1, or on both
    "other_weights": "the checksum of parameter '0.weight' is .* on rank 0 and .* on rank 1: load the same checkpoint",
    "other_statistics": "the checksum of buffer '1.running_mean' is .* on rank 0",
    "other_structure": "structure is 'diagonal' on rank 0 and 'full' on rank 1: call fit_laplace alike",
    "other_model": r"parameters is \('0.weight', .*\) on rank 0 and \('scale', .*\) on rank 1",
    "bad_data": ("failed on rank 1 of 2: InputError: batch 0: labels go from", "^batch 0: labels go from"),
    "bad_option": (
        "failed on rank 1 of 2: InputError: prior_precision is",
        "^prior_precision is -1.0; it must be a positive number",
    ),
    "outside_of_the_group": ("only a member", "this process is not in the process group"),
    "no_data": "the loader is empty",
}


@pytest.mark.parametrize("failure", [f.__name__ for f in FAILURES])
def test_ranks_that_disagree_fail_together(results: Path, failure: str) -> None:
    expected = MESSAGES[failure]
    for rank in (0, 1):
        messages = json.loads((results / f"{rank}.json").read_text())
        assert re.search(expected if isinstance(expected, str) else expected[rank], messages[failure])


# -- one process


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_needs_a_process_group() -> None:
    with pytest.raises(InputError, match=r"torchrun.*init_process_group"):
        fit_laplace(network("mlp", 3), batches(*data("classification")), distributed=True)


@pytest.mark.parametrize("structure", ["diagonal", "kronecker", "full"])
def test_a_group_of_one_is_a_plain_fit(group: None, structure: str) -> None:
    model, loader = network("mlp", 3), batches(*data("classification"))
    names = ["0.*", "3.*"]
    plain = fit_laplace(model, loader, structure=structure, parameters=names)
    for choice in (True, dist.group.WORLD):
        shared = fit_laplace(model, loader, structure=structure, parameters=names, distributed=choice)
        assert torch.equal(shared.to_dense(), plain.to_dense()) and shared.details == plain.details


def test_a_model_that_waits_for_other_ranks_is_refused(group: None) -> None:
    model = DistributedDataParallel(network("mlp", 3))
    with pytest.raises(InputError, match=r"model\.module"):
        fit_laplace(model, batches(*data("classification")), distributed=True)
    fit_laplace(model.module, batches(*data("classification")), distributed=True)


def test_a_sampler_that_repeats_points_warns(group: None) -> None:
    model, dataset = network("mlp", 3), TensorDataset(*data("classification"))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    with pytest.warns(UserWarning, match="12 points of 11.*repeats some"):
        fit_laplace(model, DataLoader(dataset, sampler=sampler), distributed=True)
    with pytest.warns(UserWarning, match="pass distributed=True"):
        fit_laplace(model, DataLoader(dataset, sampler=sampler))
    even = TensorDataset(*(t[:10] for t in data("classification")))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler = DistributedSampler(even, num_replicas=2, rank=0)
        fit_laplace(model, DataLoader(even, sampler=sampler), distributed=True, prior_precision=1.0)
