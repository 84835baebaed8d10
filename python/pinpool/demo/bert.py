"""BERT's arithmetic, one step a layer, with the layer's weights handed in by whoever has them on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F  # noqa: N812 - the name that torch's own documentation gives it

from pinpool.demo.checkpoint import WORD_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pinpool.demo.checkpoint import BertConfig

    Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Stage:
    """One layer: its weights, and the step `(weights, hidden, mask) -> hidden` that uses them."""

    weights: Weights
    step: Callable[[Weights, Tensor, Tensor], Tensor]


def stages(config: BertConfig, tensors: Weights) -> list[Stage]:
    """Cut the model into stages: the position and type embeddings, then one stage for each layer.

    The table of words is in no stage: its few rows that a sentence needs are looked up where the table lies.
    """
    embeddings = _under("embeddings.", {name: tensor for name, tensor in tensors.items() if name != WORD_TABLE})
    layers = [_under(f"encoder.layer.{layer}.", tensors) for layer in range(config.num_hidden_layers)]
    return [
        Stage(embeddings, partial(_embed, config)),
        *(Stage(layer, partial(_encode, config)) for layer in layers),
    ]


def mean_of_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return one unit vector a sentence: the mean over its tokens, (batch, tokens, hidden) to (batch, hidden)."""
    counted = mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * counted).sum(dim=1) / counted.sum(dim=1), dim=1)


def _under(prefix: str, tensors: Weights) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _embed(config: BertConfig, weights: Weights, words: Tensor, _mask: Tensor) -> Tensor:
    types = weights["token_type_embeddings.weight"][0]
    positions = weights["position_embeddings.weight"][: words.shape[1]]
    return _norm(config, weights, "LayerNorm", words + types + positions)


def _encode(config: BertConfig, weights: Weights, hidden: Tensor, mask: Tensor) -> Tensor:
    attended = _dense(weights, "attention.output.dense", _attend(config, weights, hidden, mask))
    hidden = _norm(config, weights, "attention.output.LayerNorm", hidden + attended)
    expanded = _activate(config, _dense(weights, "intermediate.dense", hidden))
    return _norm(config, weights, "output.LayerNorm", hidden + _dense(weights, "output.dense", expanded))


def _attend(config: BertConfig, weights: Weights, hidden: Tensor, mask: Tensor) -> Tensor:
    by_head = (*hidden.shape[:2], config.num_attention_heads, -1)
    query, key, value = (
        _dense(weights, f"attention.self.{part}", hidden).view(by_head).transpose(1, 2)
        for part in ("query", "key", "value")
    )
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
    return attended.transpose(1, 2).flatten(2)


def _activate(config: BertConfig, hidden: Tensor) -> Tensor:
    if config.hidden_act == "relu":
        return F.relu(hidden)
    return F.gelu(hidden, approximate="tanh" if config.hidden_act == "gelu_new" else "none")


def _dense(weights: Weights, name: str, hidden: Tensor) -> Tensor:
    return F.linear(hidden, weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(config: BertConfig, weights: Weights, name: str, hidden: Tensor) -> Tensor:
    return F.layer_norm(
        hidden, hidden.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_eps
    )
