"""The models that people use, built from their configurations at small sizes, and the table of what each can do.

    .venv/bin/python tests/compatibility.py                                  # print the table
    .venv/bin/python tests/compatibility.py --write docs/compatibility.md    # put it between the markers of the page

`test_transformer_models.py` holds every model here to what the table says. To add one, append to `TRANSFORMERS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

import propagauss as pg
from exactness import difference

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VARIANCE = 1e-6  # of every weight: small, so that what differs from sampling is what the rules leave out
SAMPLES = 400  # of all weights, for the table
LENGTH, OTHER_LENGTH, VOCABULARY, WIDTH = 6, 9, 40, 16
Example = dict[str, Tensor] | Tensor

# -- models


@dataclass(frozen=True)
class Model:
    """A model, and how it is called.

    Args:
        make: builds it; may raise ImportError if a package is missing.
        example: an input of some batch size and, for a model of sequences, length.
        reads: what an input is, which decides what may vary: tokens and their mask, vectors, or an image.
        initialise: give it weights of the size that training leaves; those of an untrained one are tiny.
    """

    name: str
    make: Callable[[], nn.Module]
    example: Callable[[int, int], Example]
    reads: Literal["tokens", "vectors", "image"]
    initialise: bool = True

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """In evaluation mode."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make().eval()
            for p in model.parameters():
                if self.initialise:
                    nn.init.normal_(p, p.mean().item(), 0.7 * p[0].numel() ** -0.5 if p.dim() > 1 else 0.1)
        return model


def tokens(batch: int, length: int = LENGTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * batch + length)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def image(batch: int, _: int = 0, size: int = 8) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))


def pixels(batch: int, _: int = 0) -> dict[str, Tensor]:
    return {"pixel_values": image(batch)}


def vectors(batch: int, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(batch))


def vectors_positions_first(batch: int, length: int = LENGTH) -> Tensor:
    return vectors(batch, length).transpose(0, 1).contiguous()


def hugging_face(architecture: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        return getattr(transformers, architecture)(getattr(transformers, config)(**settings))

    return make


_CORE = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_WORDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**_CORE, **_WORDS, "max_position_embeddings": 32}
_GROUPED = {**_TEXT, "num_key_value_heads": 1}
_IMAGE = {**_CORE, "image_size": 8, "patch_size": 4, "num_labels": 3}
_GPT2 = {**_WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
_DISTILBERT = {**_WORDS, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
_OPT = {**_TEXT, "ffn_dim": 32, "word_embed_proj_dim": WIDTH}
_EAGER = {"attn_implementation": "eager"}


def _vit(name: str, **settings: Any) -> Model:
    make = hugging_face("ViTForImageClassification", "ViTConfig", **_IMAGE, **settings)
    return Model(name, make, pixels, "image")


def _text(name: str, architecture: str, config: str, **settings: Any) -> Model:
    return Model(name, hugging_face(architecture, config, **settings), tokens, "tokens")


HUGGING_FACE = [
    _vit("ViT"),
    _vit("ViT, eager attention", **_EAGER),
    Model("DeiT", hugging_face("DeiTForImageClassification", "DeiTConfig", **_IMAGE), pixels, "image"),
    _text("GPT-2, classification", "GPT2ForSequenceClassification", "GPT2Config", **_GPT2),
    _text("GPT-2, language model", "GPT2LMHeadModel", "GPT2Config", **_GPT2),
    _text("BERT", "BertForSequenceClassification", "BertConfig", **_TEXT),
    _text("BERT, eager attention", "BertForSequenceClassification", "BertConfig", **_TEXT, **_EAGER),
    _text("DistilBERT", "DistilBertForSequenceClassification", "DistilBertConfig", **_DISTILBERT),
    _text("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", **_TEXT),
    _text("Llama", "LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    _text("Llama, eager attention", "LlamaForCausalLM", "LlamaConfig", **_GROUPED, **_EAGER),
    _text("SmolLM2", "LlamaForCausalLM", "LlamaConfig", **_GROUPED, tie_word_embeddings=True),
    _text("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", **_GROUPED),
    _text("Mistral", "MistralForCausalLM", "MistralConfig", **_GROUPED),
    _text("OPT", "OPTForCausalLM", "OPTConfig", **_OPT),
    _text("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", **_TEXT),
]


def encoder(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, **settings)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return make


TORCH = [
    Model("nn.TransformerEncoder", encoder(batch_first=True), vectors, "vectors"),
    Model("nn.TransformerEncoder, positions first", encoder(), vectors_positions_first, "vectors"),
]


def _timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(8, 4, num_classes=3, embed_dim=WIDTH, depth=2, num_heads=2)


def _timm_resnet() -> nn.Module:
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=3, stem_width=8, channels=(8, 8, 16, 16))


def _timm_convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=3, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16))


def _large(batch: int, _: int = 0) -> Tensor:
    return image(batch, size=32)


TIMM = [
    Model("timm ViT", _timm_vit, image, "image"),
    Model("timm ResNet", _timm_resnet, _large, "image"),
    Model("timm ConvNeXt", _timm_convnext, _large, "image"),
]


def _convolutional() -> list[Model]:
    """The networks of `test_cnn_models.py`, which tests them more closely."""
    try:
        from engines.test_cnn_models import NETWORKS
    except ImportError:
        return []

    def model(network: Any) -> Model:
        def example(batch: int, _: int = 0) -> Tensor:
            return image(batch, size=network.size)

        return Model(network.name, lambda: network.build(torch.float32)[0], example, "image", initialise=False)

    return [model(n) for n in NETWORKS]


TRANSFORMERS = [*HUGGING_FACE, *TORCH]


# -- what each can do


def call(model: nn.Module, x: Example) -> Tensor:
    with torch.no_grad():
        y = model(**x) if isinstance(x, dict) else model(x)
    return getattr(y, "logits", y)


def posterior(model: nn.Module) -> pg.Posterior:
    """Every weight random and independent."""
    return pg.DiagonalPosterior({n: torch.full_like(p, VARIANCE) for n, p in model.named_parameters()})


@cache
def streamlined(model: Model) -> tuple[nn.Module, pg.Streamlined]:
    """Traced once, on a single sample."""
    network = model.build()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the model never uses")
        return network, pg.streamline(network, posterior(network), model.example(1, LENGTH))


def agrees(model: Model, batch: int, length: int = LENGTH) -> bool:
    """Whether the mean on such a batch is the model's own, and the variance finite and positive."""
    network, net = streamlined(model)
    x = model.example(batch, length)
    with torch.no_grad():
        g = net(x)
    y = call(network, x)
    same = g.mean.shape == y.shape and torch.allclose(g.mean, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))
    return same and bool(g.variance.isfinite().all()) and bool((g.variance > 0).all())


def varies(model: Model, batch: int, length: int = LENGTH) -> str:
    """`yes`, or `no` if an input of another size is refused with a clear error; any other answer is a bug."""
    try:
        return "yes" if agrees(model, batch, length) else "wrong"
    except pg.InputError:
        return "no"
    except (RuntimeError, IndexError):
        return "no, by an unclear error"


def ratio(model: Model, samples: int = 100) -> float:
    """Streamlined over sampled standard deviation, root mean square over outputs."""
    network, net = streamlined(model)
    x = model.example(1, LENGTH)
    generator = torch.Generator().manual_seed(0)
    mean = {n: p.detach() for n, p in network.named_parameters()}

    def draw() -> Tensor:
        weights = {n: p + VARIANCE**0.5 * torch.randn(p.shape, generator=generator) for n, p in mean.items()}
        args, kwargs = ((), x) if isinstance(x, dict) else ((x,), {})
        y = torch.func.functional_call(network, weights, args, kwargs)
        return getattr(y, "logits", y)

    with torch.no_grad():
        sampled = torch.stack([draw() for _ in range(samples)]).var(0)
        return float((net(x).variance.mean() / sampled.mean()).sqrt())


def exactness(model: Model) -> str:
    """The relative difference between `linearise` and the Jacobian form, in double precision."""
    try:
        return f"{difference(model.build(), model.example(2, LENGTH)):.0e}"
    except pg.UnsupportedOpError:
        return "refused"


HEADER = (
    "model",
    "exports",
    "mean equal",
    "dynamic batch",
    "dynamic sequence",
    "sd ratio to Monte Carlo",
    "linearised: relative difference to the Jacobian form",
)


def row(model: Model, samples: int = SAMPLES) -> tuple[str, ...] | None:
    """One line of the table; None if a package is missing."""
    try:
        streamlined(model)
    except ImportError:
        return None
    except pg.PropagaussError as error:
        print(f"{model}: {error}", file=sys.stderr)
        return (model.name, "no", *["–"] * (len(HEADER) - 2))
    batch = varies(model, 3)
    sequence = varies(model, 1, OTHER_LENGTH) if model.reads != "image" else "–"
    mean = "yes" if agrees(model, 1) else "no"
    return model.name, "yes", mean, batch, sequence, f"{ratio(model, samples):.2f}", exactness(model)


def timm_rows(samples: int = SAMPLES) -> list[tuple[str, ...]]:
    """Rows of timm's models, made in a process of their own: with torchvision around, other libraries do not load."""
    if not TIMM_FOLDER.is_dir():
        return []
    command = [sys.executable, __file__, "--only-timm", f"--samples={samples}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [tuple(cells) for cells in json.loads(done.stdout.splitlines()[-1])]


def _print_timm_rows(samples: int) -> None:
    # PyPI's torchvision fails at this module beside a CPU build of torch; timm does not need what it registers
    sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
    sys.path.append(str(TIMM_FOLDER))
    print(json.dumps([row(model, samples) for model in TIMM]))


def table(models: list[Model]) -> str:
    rows = [HEADER, ("---",) * len(HEADER), *filter(None, map(row, models)), *timm_rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


TIMM_FOLDER = Path(sys.prefix) / "timm"  # where `make setup` puts timm and torchvision, apart from all else
START, END = "<!-- compatibility:start -->", "<!-- compatibility:end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page that holds the markers of the table")
    parser.add_argument("--only-timm", action="store_true", help="print the rows of timm's models as JSON")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="draws of the weights for these rows")
    args = parser.parse_args()
    page = args.write
    torch.set_num_threads(1)
    if args.only_timm:
        _print_timm_rows(args.samples)
        return
    text = table([*TRANSFORMERS, *_convolutional()])
    if page is None:
        print(text)
        return
    before, rest = page.read_text().split(START)
    after = rest.split(END)[1]
    page.write_text(f"{before}{START}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
