"""Make a Hugging Face configuration small by the names of its settings, whatever the architecture.

Two recipes, since no single one fits all: `fixed` gives every width, depth and count one small value, `scaled` divides
the widths by a common number, which keeps what they owe each other (heads times head size, a sum of parts).
"""

from __future__ import annotations

import re
from typing import Any

VOCABULARY, LENGTH, IMAGE = 64, 8, 32
WIDTH, HEADS, LAYERS, EXPERTS = 32, 2, 2, 4

# The first pattern that matches the name of an integer setting decides its value.
FIXED: list[tuple[str, int]] = [
    (r"type_vocab_size", 2),
    (r"vocab_size$|vocabulary_size$|codebook_size|num_embeddings", VOCABULARY),
    (r"num_experts_per_tok|moe_topk|moe_top_k|top_k$|num_selected_experts|experts_per_token", 2),
    (r"n_group$|topk_group|num_expert_groups?|n_groups$|mamba_n_groups", 1),
    (r"shared_expert.*size|moe_.*size|expert.*(size|dim)$", 16),
    (r"(n|num)_shared_experts", 1),
    (r"experts$|num_experts", EXPERTS),
    (r"upsample_groups", WIDTH),
    (r"num_groups$", 4),
    (r"qk_(rope|nope)_head_dim", 8),
    (r"qk_head_dim|v_head_dim", 16),
    (r"lora_rank|index_head_dim", 16),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"index_topk", 4),
    (r"(kv|key_value)_heads$|num_kv_heads|index_n_heads", 2),
    (r"heads$|n_head$|attention_heads", HEADS),
    (r"head_dim|d_kv$|dim_head|attention_head_size|head_size", WIDTH // HEADS),
    (r"(decoder_)?start_token_id$", 1),
    (r"intermediate|ffn|d_ff$|d_inner$|mlp_dim|n_inner", 48),
    (r"layers$|n_layer$|^depth$|_depth$|num_blocks$|num_encoder_blocks", LAYERS),
    (r"position_embeddings$|n_positions|max_(source|target)_positions|max_seq_len|n_ctx$|max_position", 64),
    (r"state_size|d_state$", 8),
    (r"image_size$", IMAGE),
    (r"num_queries|num_query_tokens|num_latents|n_latents", 4),
    (r"sliding_window$|attention_chunk_size|local_window", 4),
    (r"chunk_size$", 4),
    (r"hidden|d_model|n_embd|embed|^dim$|emb_dim|projection|proj_dim|proj_size|output_dim|channels$|width$", WIDTH),
]
# Settings that look alike but mean something else.
KEPT = re.compile(
    r"num_channels|in_channels|num_feat_extract|audio_channels|num_conv_pos|layerdrop|_token_(id|index)$|subsampling_factor|scale|ratio|"
    r"conv_kernel|kernel_size|stride|patch_size|num_hidden_layers_to|out_features|num_feature_levels|expan"
)
WIDTHS = re.compile(
    r"hidden|d_model|n_embd|embed|^dim$|dim$|channels$|width$|size$|ffn|d_ff|intermediate|lora_rank|d_inner|rank$"
)
# Settings without a default that a small member needs.
MISSING = {
    "num_experts_per_tok": 2,
    "head_dim": WIDTH // HEADS,
    "prediction_length": 4,
    "vocab_size": VOCABULARY,
    "num_key_value_heads": HEADS,
    "pad_token_id": 0,
}
DEPTHS = re.compile(r"layers$|n_layer$|^depth$|num_blocks$")


def fixed(name: str, value: int) -> int | None:
    if KEPT.search(name):
        return None
    return next((small for pattern, small in FIXED if re.search(pattern, name)), None)


def scaled(name: str, value: int, by: int = 16) -> int | None:
    if re.search(r"vocab_size$|image_size|position|experts|window|chunk|index_topk|queries", name):
        return fixed(name, value)
    if DEPTHS.search(name):
        return LAYERS
    if KEPT.search(name) or not WIDTHS.search(name) or value < 2 * by:
        return None
    return value // by


def shrunken(config: Any, recipe: Any, settings: dict[str, Any], prefix: str = "") -> Any:
    """A small configuration of the same class; `settings` (`text_config.hidden_size`) win over the recipe."""
    small: dict[str, Any] = {}
    used_ids: set[int] = set()
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("transformers_version", "model_type", "architectures"):
            continue
        if hasattr(value, "to_dict"):
            small[name] = shrunken(value, recipe, settings, f"{prefix}{name}.").to_dict()
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            small[name] = _token(value, used_ids)
        elif isinstance(value, int) and not isinstance(value, bool):
            new = recipe(name, value)
            if new is not None and new < value:
                small[name] = new
        elif isinstance(value, list | tuple):
            new = _shorter(name, value)
            if new is not None:
                small[name] = new
    small |= _lists_per_layer(config, small)
    small |= {name: value for name, value in MISSING.items() if name in vars(config) and vars(config)[name] is None}
    if "qk_rope_head_dim" in small and "head_dim" in vars(config):
        small["head_dim"] = small["qk_rope_head_dim"]
    rope = vars(config).get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        small["rope_parameters"] = {**rope, "mrope_section": _sections(config, small, rope)}
    for name, value in settings.items():
        path, _, leaf = name.rpartition(".")
        if path == prefix.rstrip(".") or name == leaf == "*":
            small[leaf] = value
    small.setdefault("use_cache", False)
    small = {k: v for k, v in small.items() if v is not DROP}
    return type(config)(**small)


DROP = object()


def _token(value: int, used: set[int]) -> int:
    """A special token inside the small vocabulary, distinct from the others."""
    if value < 8 or value in used:
        used.add(value)
        return value
    new = next(i for i in range(40, VOCABULARY) if i not in used)
    used.add(new)
    return new


def _lists_per_layer(config: Any, small: dict[str, Any]) -> dict[str, list[Any]]:
    """Lists with an entry per layer, cut to the small number of layers."""
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        depth, before = small.get(name), vars(config).get(name)
        if depth and before:
            lists = {n: v for n, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == before > depth}
            return {n: _one_of_each(list(v), depth) for n, v in lists.items()}
    return {}


def _sections(config: Any, small: dict[str, Any], rope: dict[str, Any]) -> list[int]:
    """Parts of a head that are turned by time, height and width: together half of what is turned at all."""
    values = {**vars(config), **small}
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _one_of_each(kinds: list[Any], depth: int) -> list[Any]:
    """As many layers as wanted, of as many kinds as there are."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct + [distinct[-1]] * depth)[:depth]


def _shorter(name: str, value: Any) -> Any:
    """Sizes and depths of the stages of a pyramid."""
    whole = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not whole or not value:
        return None
    small: list[int] | None = None
    if re.search(r"depths$|blocks$|layers$|num_blocks|blocks_per_stage", name):
        small = [1] * len(value)
    elif re.search(r"heads", name):
        small = [min(v, 2) for v in value]
    elif (
        re.search(r"hidden_sizes$|embed_dims?$|embed_dim_per_stage|dims$|neck_hidden_sizes", name) and min(value) >= 16
    ):
        small = [8 * (1 + i) for i in range(len(value))] if len(set(value)) > 1 else [16] * len(value)
    elif name in ("conv_dim", "tdnn_dim"):
        small = [16] * len(value)
    return type(value)(small) if small is not None else None
