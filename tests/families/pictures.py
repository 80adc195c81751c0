"""timm and torchvision: one small member per family, at the smallest image that it takes.

The two live in a folder of their own, see docs/gotchas.md; once they are loaded, other libraries may not load.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from families.family import Built, Family

FOLDER = Path(sys.prefix) / "timm"
SIZES = (32, 64, 96, 128, 160, 224, 256)
LARGEST = 40_000_000
NARROW = {"mobilenetv5": {"channel_multiplier": 0.125}}  # families without a small member
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b", "swin3d_t")
SEGMENTATION = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")


def families() -> list[Family]:
    if not FOLDER.is_dir():
        return []
    # PyPI's torchvision fails at this module beside a CPU build of torch; the models do not need what it registers
    sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return [*_timm(), *_torchvision()]


def _timm() -> list[Family]:
    """A family is a module of timm, and within it the first word of a name (`byobnet.repvgg`)."""
    import timm
    from timm.models import _registry as registry

    members: dict[str, list[str]] = {}
    for name in timm.list_models(exclude_filters=["test_*", "tf_*"]):
        word = re.match(r"[a-z]+", name)
        members.setdefault(f"{registry._model_to_module[name]}.{word[0] if word else name}", []).append(name)
    return [Family(f"timm/{f}", partial(_timm_member, names), initialise=True) for f, names in sorted(members.items())]


def _timm_member(names: list[str]) -> Built:
    errors: list[str] = []
    for name in _smallest_first(names)[:2]:
        for size in SIZES:
            try:
                torch.manual_seed(0)
                model = _timm_model(name, size).eval()
                example = (torch.randn(2, 3, size, size),)
                with torch.no_grad():
                    model(*example)
                return model, example
            except Exception as error:
                errors.append(f"{name} at {size}: {type(error).__name__}: {str(error)[:100]}")
    raise RuntimeError(" ;; ".join(errors[-4:]))


def _timm_model(name: str, size: int) -> nn.Module:
    import timm

    settings = NARROW.get(name.split("_")[0], {})
    try:
        return timm.create_model(name, num_classes=3, img_size=size, **settings)
    except TypeError:  # most convolutional networks take any size
        return timm.create_model(name, num_classes=3, **settings)


def _smallest_first(names: list[str]) -> list[str]:
    """By the number of parameters, counted without memory for them."""
    import timm

    sizes = {}
    for name in names[:: max(1, len(names) // 12)]:
        try:
            with torch.device("meta"):
                sizes[name] = sum(p.numel() for p in timm.create_model(name, num_classes=3).parameters())
        except Exception:
            sizes[name] = LARGEST
    return [n for n in sorted(sizes, key=lambda n: sizes[n]) if sizes[n] <= LARGEST] or list(sizes)


def _torchvision() -> list[Family]:
    small = [
        "alexnet",
        "vgg11",
        "resnet18",
        "squeezenet1_1",
        "densenet121",
        "inception_v3",
        "googlenet",
        "shufflenet_v2_x0_5",
        "mobilenet_v2",
        "mobilenet_v3_small",
        "resnext50_32x4d",
        "wide_resnet50_2",
        "mnasnet0_5",
        "efficientnet_b0",
        "regnet_y_400mf",
        "vit_b_32",
        "swin_t",
        "swin_v2_t",
        "maxvit_t",
        "convnext_tiny",
    ]
    names = [*small, *(f"segmentation.{n}" for n in SEGMENTATION), *(f"video.{n}" for n in VIDEO)]
    return [Family(f"torchvision/{name}", partial(_torchvision_member, name), initialise=True) for name in names]


def _torchvision_member(name: str) -> Built:
    from torchvision import models

    module, _, leaf = name.rpartition(".")
    make = getattr(getattr(models, module) if module else models, leaf)
    settings = {"weights": None, **({"weights_backbone": None} if module == "segmentation" else {})}
    errors: list[str] = []
    for size in (32, 64, 112, 224, 299):
        shape = (2, 3, 16, size, size) if module == "video" else (2, 3, size, size)
        try:
            model = make(**settings).eval()
            with torch.no_grad():
                model(torch.randn(shape))
            return model, (torch.randn(shape),)
        except Exception as error:
            errors.append(f"at {size}: {str(error)[:120]}")
    raise RuntimeError(" ;; ".join(errors))
