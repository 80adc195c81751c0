"""Every architecture of the installed `transformers`, from a configuration made small, with random weights."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import nn

from families.family import Built, Family, wanted
from families.hf_inputs import examples
from families.hf_settings import ARCHITECTURES, ARGUMENTS, SETTINGS
from families.shrink import fixed, scaled, shrunken

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The head that a family gets: the first of these tasks that it has, or no head at all.
TASKS = [
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "TIME_SERIES_PREDICTION",
    "TIME_SERIES_REGRESSION",
    "IMAGE_TO_IMAGE",
    "IMAGE_MATTING",
    "KEYPOINT_DETECTION",
    "POSE_ESTIMATION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "UNIVERSAL_SEGMENTATION",
    "TEXT_RECOGNITION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
]
LARGEST = 30_000_000  # parameters: a member above this has not been made small


def families() -> list[Family]:
    """One per architecture class: types that share a class (GPT-2 and its Swedish relative) are one family."""
    found: dict[str, Family] = {}
    for kind, architecture in sorted(_architectures().items()):
        family = Family(f"transformers/{kind}", partial(build, kind, architecture), initialise=True)
        found.setdefault(architecture, family)
    return list(found.values())


def _architectures() -> dict[str, str]:
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    tables = [getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS] + [auto.MODEL_MAPPING_NAMES]
    chosen = {}
    for kind in CONFIG_MAPPING_NAMES:
        name = next((table[kind] for table in tables if kind in table), None)
        if name is not None:
            chosen[kind] = name if isinstance(name, str) else name[0]
    return chosen | ARCHITECTURES


def build(kind: str, architecture: str) -> Built:
    """The first recipe and the first call that run."""
    errors: list[str] = []
    settings = SETTINGS.get(kind, {})
    for recipe in (fixed, scaled, partial(scaled, by=8)):
        try:
            model, config = _model(kind, architecture, recipe, settings)
        except Exception as error:
            errors.append(f"{_short(error)}")
            continue
        tried = []
        for example in examples(model, config, ARGUMENTS.get(kind, lambda _: {})(config)):
            try:
                with torch.no_grad():
                    if bool(torch.isfinite(wanted(model(**example))).any()):
                        return model, example
                tried.append("not finite")
            except Exception as error:
                tried.append(f"{'+'.join(example)}: {_short(error)}")
        errors.append(" | ".join(tried[:4]))
    raise RuntimeError(" ;; ".join(errors))


def _model(kind: str, architecture: str, recipe: Any, settings: dict[str, Any]) -> tuple[nn.Module, Any]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    architecture_class = getattr(transformers, architecture)
    config = _fitting(shrunken(CONFIG_MAPPING[kind](), recipe, settings), architecture_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in architecture_class(config).parameters())
    if size > LARGEST:
        raise RuntimeError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return architecture_class(config).eval(), config


def _fitting(config: Any, architecture_class: Any) -> Any:
    """The part of a configuration of many parts (text, vision) that the architecture is for."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    return next((part for part in parts if isinstance(part, architecture_class.config_class)), config)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:150]}".replace("\n", " ")
