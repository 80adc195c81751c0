"""Exported predictors in ONNX Runtime, against the plain model exported the same way; one thread each."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import propagauss as pg
from benchmarks import cnn, mlp, transformers
from benchmarks.case import Case, Faster, Method, Predict, SkipMethod

MLP_LIMITS = {1: 2.2, 64: 2.4}
EAGER, OURS_EAGER, OURS = "plain, eager PyTorch", "streamlined, eager PyTorch", "streamlined"


class Session:
    """A file in ONNX Runtime, called with one tensor; returns arrays in the order of its outputs."""

    outside_torch = True

    def __init__(self, path: Path, note: str = ""):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(path), options)
        self.name = self.session.get_inputs()[0].name
        self.note = note

    def __call__(self, x: Tensor) -> Any:
        return self.session.run(None, {self.name: x.numpy()})


class Plain(nn.Module):
    """The model with a tensor as its output, for models that return an object."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        output = self.model(x)
        return getattr(output, "logits", output)


def exported(write: Callable[[Path], Any]) -> Session:
    """What `write` exports, loaded; the time it took is the note of the row."""
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SkipMethod(f"{error.name} is not installed: pip install propagauss[export]") from error
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, start = Path(folder) / "model.onnx", time.perf_counter()
        write(path)
        seconds = time.perf_counter() - start
        return Session(path, f"exported in {seconds:.1f} s, {path.stat().st_size / 2**20:.1f} MiB")


def write_plain(model: nn.Module, example: Tensor, path: Path) -> None:
    shapes = ({0: Dim.AUTO},)
    torch.onnx.export(
        Plain(model).eval(),
        (example,),
        path,
        dynamic_shapes=shapes,
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def plain(model: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> Session:
    x = inputs()
    example = x if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1))  # a batch of one would be taken as fixed
    return exported(partial(write_plain, model(), example))


def ours(net: Callable[[], pg.Streamlined]) -> Session:
    return exported(pg.Classifier(net()).export)


# -- cases


def cases(batches: Iterable[int] | None = None) -> list[Case]:
    chosen = tuple(batches or mlp.BATCHES)
    return [*map(_mlp, chosen), _resnet(), *([_vit()] if 1 in chosen else [])]


def _mlp(batch: int) -> Case:
    name = "-".join(map(str, mlp.SIZES))
    title = f"{name} ReLU MLP, diagonal posterior, batch {batch}, in ONNX Runtime"
    net = partial(mlp.streamlined, mlp.SIZES, "diagonal", "diagonal")
    return _case(
        f"onnx/mlp/{batch}",
        title,
        partial(mlp.trained, mlp.SIZES),
        partial(mlp.inputs, mlp.SIZES, batch),
        {OURS: net},
        MLP_LIMITS.get(batch),
    )


def _resnet() -> Case:
    title = f"ResNet-18 for 32 px, every parameter Bayesian, batch {cnn.BATCH}, in ONNX Runtime"
    return _case("onnx/resnet", title, cnn.model, partial(cnn.inputs, cnn.BATCH), {OURS: cnn.exact}, patience=3)


def _vit() -> Case:
    title = "Hugging Face ViT-base config, 224 px, batch 1, in ONNX Runtime; Bayesian:"
    nets = {
        "values of the last two blocks, head": partial(_vit_network, tuple(transformers.VIT_VALUES)),
        "all blocks and the head": partial(_vit_network, tuple(transformers.VIT_ALL)),
    }
    own = partial(transformers.model, "vit"), transformers.image
    return _case("onnx/vit", title, *own, nets, patience=3, heavy=True)


@cache
def _vit_network(patterns: tuple[str, ...]) -> pg.Streamlined:
    return transformers.streamlined("vit", list(patterns))


def _case(
    name: str,
    title: str,
    model: Callable[[], nn.Module],
    inputs: Callable[[], Tensor],
    nets: dict[str, Callable[[], pg.Streamlined]],
    limit: float | None = None,
    patience: float = 1.0,
    heavy: bool = False,
) -> Case:
    def eager() -> Predict:
        return Plain(model()).eval()

    methods, faster = [Method(EAGER, eager)], []
    for label, net in nets.items():
        same = label == list(nets)[-1]  # one pair of a case is checked to agree
        pair = (OURS_EAGER, OURS) if len(nets) == 1 else (f"{label}, eager PyTorch", label)
        methods += [
            Method(pair[0], net, same=same, heavy=heavy),
            Method(pair[1], partial(ours, net), limit=limit, same=same, heavy=heavy),
        ]
        faster += [Faster(pair[1], EAGER), Faster(pair[1], pair[0])]
    return Case(name, title, inputs, partial(plain, model, inputs), methods, patience, faster)
