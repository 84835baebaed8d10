"""The demo: its reader of safetensors files, its tokenizer, its model, and the whole job on real weights."""

import gc
import json
import struct

import pytest
import torch

from pinpool import PinnedPool
from pinpool.demo import DemoError, job, stream
from pinpool.demo.bert import Stage
from pinpool.demo.checkpoint import Checkpoint, default_weights
from pinpool.demo.models import PlainModel, same_bits
from pinpool.demo.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from pinpool.demo.tokenizer import WordPiece

HIDDEN, INTERMEDIATE, LAYERS = 16, 24, 3
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "in", "bread", "kitchen", "##s", "to", ".", ","]
CONFIG = {
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "vocab_size": len(VOCABULARY),
    "max_position_embeddings": 32,
    "type_vocab_size": 2,
}
NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def pack(header, data=b""):
    """The bytes of a safetensors file with this header, which may be bytes or what JSON can say."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype, shape, start, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_tensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        content = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = entry(NAMES[tensor.dtype], list(tensor.shape), len(data), len(data) + len(content))
        data += content
    path.write_bytes(pack(header, data))


def layer_tensors(prefix, random):
    shapes = {"attention.self.query": (HIDDEN, HIDDEN), "attention.self.key": (HIDDEN, HIDDEN)}
    shapes |= {"attention.self.value": (HIDDEN, HIDDEN), "attention.output.dense": (HIDDEN, HIDDEN)}
    shapes |= {"intermediate.dense": (INTERMEDIATE, HIDDEN), "output.dense": (HIDDEN, INTERMEDIATE)}
    tensors = {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors |= {f"{prefix}{name}.bias": random(shape[0]) for name, shape in shapes.items()}
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return tensors | {f"{prefix}{norm}.{part}": random(HIDDEN) for norm in norms for part in ("gamma", "beta")}


def small_bert(dtype=torch.float32):
    """The tensors of a small BERT with a task head, under the names that such files have."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "bert.embeddings.position_ids": torch.arange(32).unsqueeze(0),
        "bert.embeddings.word_embeddings.weight": random(len(VOCABULARY), HIDDEN),
        "bert.embeddings.position_embeddings.weight": random(32, HIDDEN),
        "bert.embeddings.token_type_embeddings.weight": random(2, HIDDEN),
        "bert.embeddings.LayerNorm.gamma": random(HIDDEN),
        "bert.embeddings.LayerNorm.beta": random(HIDDEN),
        "cls.predictions.bias": random(len(VOCABULARY)),
    }
    for layer in range(LAYERS):
        tensors |= layer_tensors(f"bert.encoder.layer.{layer}.", random)
    return tensors


def write_model(folder, tensors, **changes):
    """Write a whole model and return the path of its weights; a change to None takes the key out of config.json."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    path = folder / "weights.safetensors"
    write_tensors(path, tensors)
    return path


def run(*arguments, **options):
    # System calls are counted for the whole process: pools that other tests left behind must not go while this runs.
    gc.collect()
    return job.run(*arguments, **options)


def refused(path):
    with pytest.raises(DemoError) as caught:
        Checkpoint(path)
    message = str(caught.value)
    assert str(path.parent) in message
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def minilm():
    return run(default_weights(), 2)


# The whole job on real weights


def test_minilm_gives_the_bits_of_the_plain_run(minilm):
    assert minilm.laps == 2
    assert minilm.different_laps == 0
    assert minilm.identical
    assert minilm.passed


def test_minilm_makes_no_system_call_after_the_first_lap(minilm):
    assert minilm.first_os_calls > 0
    assert minilm.later_os_calls == 0
    assert minilm.later_hits > 0
    assert minilm.later_misses == 0
    assert minilm.hit_rate == 1


def test_minilm_is_all_in_locked_blocks_and_visits_the_device_in_parts(minilm):
    assert minilm.tensors == 5 + 6 * 16
    assert minilm.weight_bytes <= minilm.requested_bytes <= minilm.reserved_bytes
    assert minilm.locked_bytes >= minilm.weight_bytes
    one_layer = 4 * (4 * 384 * 384 + 2 * 384 * 1536 + 9 * 384 + 1536)
    assert minilm.device_bytes == 2 * one_layer


def test_minilm_knows_which_sentences_are_alike(minilm):
    assert minilm.similar > 0.7
    assert minilm.unrelated < 0.2


def test_the_table_says_it_all(minilm):
    table = minilm.table()
    assert "101 tensors, 86.1 MiB" in table
    assert f"{minilm.locked_bytes:,} bytes" in table
    assert "0 after the first lap" in table
    assert "bit-identical to the plain run in all 2 laps" in table


def test_minilm_embeds_as_its_authors_library_does():
    with Checkpoint(default_weights()) as checkpoint, torch.inference_mode():
        host = torch.device("cpu")
        vectors = PlainModel(checkpoint, host).embed(job._tokenize(checkpoint, host))
    # Computed once with transformers' BertModel, mean pooling and normalisation.
    assert vectors.shape == (len(job.SENTENCES), 384)
    assert vectors[0, :4].tolist() == pytest.approx([0.0766347, 0.0196423, -0.0410687, -0.0000696], abs=1e-5)
    assert vectors[6, :4].tolist() == pytest.approx([0.0587509, 0.0412535, 0.0331375, 0.0726426], abs=1e-5)


# Other models, and what a failed run looks like


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_bert_runs_whatever_its_dtype_and_names(tmp_path, dtype):
    report = run(write_model(tmp_path, small_bert(dtype)), 3)
    assert report.passed
    assert report.tensors == 5 + LAYERS * 16


@pytest.mark.parametrize("activation", ["relu", "gelu_new"])
def test_other_activations_run(tmp_path, activation):
    assert run(write_model(tmp_path, small_bert(), hidden_act=activation), 2, host_only=True).passed


def test_a_model_of_one_layer_runs(tmp_path):
    assert run(write_model(tmp_path, small_bert(), num_hidden_layers=1), 2, host_only=True).passed


def test_one_wrong_bit_on_the_way_is_found(tmp_path, monkeypatch):
    copy_in = stream.HostDevice.copy_in

    def flip_one_bit(self, weights):
        copies = copy_in(self, weights)
        copies.get("output.dense.bias", torch.zeros(1)).view(torch.int32)[0] ^= 1 << 22
        return copies

    monkeypatch.setattr(stream.HostDevice, "copy_in", flip_one_bit)
    report = run(write_model(tmp_path, small_bert()), 2, host_only=True)
    assert report.different_laps == 2
    assert not report.passed
    assert "NOT those of the plain run in 2 of 2 laps" in report.table()


def test_system_calls_in_later_laps_fail_the_run(tmp_path, monkeypatch):
    def grow(self):
        self._pool.reserve(1 << 20)

    monkeypatch.setattr(stream.HostDevice, "await_compute", grow)
    report = run(write_model(tmp_path, small_bert()), 2, host_only=True)
    assert report.identical
    assert report.later_os_calls > 0
    assert not report.passed


def test_same_bits_is_stricter_than_equal():
    assert same_bits(torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(3))


# Streaming


class RecordingDevice:
    """A device that keeps a log, and the most stages that were on it at once."""

    label = "recording"
    device = torch.device("cpu")

    def __init__(self):
        self.log = []
        self.copies = []
        self.most_resident = 0

    def copy_in(self, weights):
        self.log.append(f"copy {int(weights['w'])}")
        self.copies.append({"w": weights["w"].clone()})
        self.most_resident = max(self.most_resident, sum(map(bool, self.copies)))
        return self.copies[-1]

    def await_copies(self):
        self.log.append("await copies")

    def await_compute(self):
        self.log.append("await compute")


def append_digit(weights, hidden, _mask):
    return hidden * 10 + weights["w"]


def test_never_more_than_two_stages_are_on_the_device():
    device = RecordingDevice()
    stages = [
        Stage({"w": torch.tensor(index)}, lambda weights, hidden, _: hidden * 10 + weights["w"]) for index in range(6)
    ]
    with PinnedPool() as pool, stream.Streamer(device, pool) as streamer:
        assert int(streamer.run(stages, torch.tensor(0), torch.tensor(0))) == 12345
    assert device.most_resident == 2
    assert not any(device.copies)
    assert streamer.peak_bytes == 2 * stages[0].weights["w"].nbytes
    assert [line for line in device.log if line.startswith("copy")] == [f"copy {index}" for index in range(6)]


def test_an_error_of_the_copying_thread_reaches_the_caller():
    class Full(RecordingDevice):
        def copy_in(self, _weights):
            raise OSError("no room")

    with PinnedPool() as pool, stream.Streamer(Full(), pool) as streamer, pytest.raises(OSError, match="no room"):
        streamer.run([Stage({}, append_digit)], torch.tensor(0), torch.tensor(0))


class FakeStream:
    """Stands in for a stream of an accelerator: it logs what it waits for."""

    device = torch.device("cpu")

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def fake_accelerator(monkeypatch):
    """Torch with an accelerator that is the host: what was asked of its streams is in the log."""
    log = []
    current = [FakeStream(log, "compute")]
    monkeypatch.setattr(torch, "Stream", lambda _device: FakeStream(log, "copies"))
    monkeypatch.setattr("pinpool._devices._torch_device", lambda: None)  # the pool is to register with none
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "is_available", lambda: True)
    monkeypatch.setattr(accelerator, "current_stream", lambda _device=None: current[0])
    monkeypatch.setattr(accelerator, "set_stream", lambda to: current.__setitem__(0, to) or log.append(f"on {to.name}"))
    return log


def test_an_accelerator_gets_its_copies_on_a_stream_of_their_own(tmp_path, fake_accelerator):
    report = run(write_model(tmp_path, small_bert(), num_hidden_layers=1), 2)
    copied = ["on copies", "on compute"]
    ready, left = "compute waits for copies", "copies waits for compute"
    assert report.device == "cpu"
    assert report.passed
    one_lap = [*copied, ready, *copied, left, ready, left]
    assert fake_accelerator == one_lap * 2


# The reader of safetensors files


def test_the_reader_fills_blocks_with_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "by-hand.safetensors"
    floats = struct.pack("<3f", 1.5, -2.25, 1e30)
    halves = bytes.fromhex("803f 00c0 c07f 0080".replace(" ", ""))
    header = {
        "__metadata__": {"who": "by hand"},
        "brain floats": entry("BF16", [2, 2], 12, 20),
        "empty": entry("I64", [0, 5], 20, 20),
        "floats": entry("F32", [3], 0, 12),
        "one": entry("U8", [], 20, 21),
    }
    path.write_bytes(pack(header, floats + halves + b"\x2a"))
    with SafetensorsFile(path) as file, PinnedPool() as pool:
        blocks = {name: pool.empty(found.shape, found.dtype) for name, found in file.entries.items()}
        for name, block in blocks.items():
            file.read_into(name, block)
        tensors = {name: torch.from_dlpack(block) for name, block in blocks.items()}
    assert tensors["floats"].tolist() == [1.5, -2.25, struct.unpack("<f", floats[8:])[0]]
    assert tensors["brain floats"].dtype == torch.bfloat16
    assert tensors["brain floats"].view(torch.int16).tolist() == [[0x3F80, -0x4000], [0x7FC0, -0x8000]]
    assert tensors["empty"].shape == (0, 5)
    assert tensors["empty"].dtype == torch.int64
    assert tensors["one"].shape == ()
    assert tensors["one"].item() == 42


FOUR = entry("U8", [4], 0, 4)
DAMAGED = {
    "empty file": (b"", "0 bytes"),
    "cut length": (b"\x10\0\0", "3 bytes"),
    "length past the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "header length"),
    "huge length": (b"\xff" * 8 + b"{}", "header length"),
    "cut header": (pack({"a": FOUR})[:20], "ends after 12"),
    "not JSON": (pack(b"{'a'}"), "not valid JSON"),
    "not text": (pack(b'{"\xff\xfe": 1}'), "not valid JSON"),
    "deep JSON": (pack(b"[" * 100_000), "not valid JSON"),
    "twice the same name": (pack(b'{"a": 1, "a": 2}'), "twice"),
    "a list": (pack([1]), "not a JSON object"),
    "entry is a number": (pack({"a": 1}), "'a' is not a JSON object"),
    "no dtype": (pack({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"), "dtype None"),
    "unknown dtype": (pack({"a": entry("F4", [4], 0, 4)}, b"1234"), "dtype 'F4'"),
    "dtype is a list": (pack({"a": entry(["U8"], [4], 0, 4)}, b"1234"), "dtype ['U8']"),
    "negative size": (pack({"a": entry("U8", [-4], 0, 4)}, b"1234"), "shape [-4]"),
    "size is true": (pack({"a": entry("U8", [True], 0, 1)}, b"1"), "shape [True]"),
    "no shape": (pack({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234"), "shape None"),
    "offsets backwards": (pack({"a": entry("U8", [4], 4, 0)}, b"1234"), "offsets [4, 0]"),
    "three offsets": (pack({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}), "offsets [0, 2, 4]"),
    "offsets out of range": (
        pack({"a": entry("U8", [5], 0, 5)}, b"1234"),
        "ends at byte 5 of the data and there are 4",
    ),
    "offsets past 64 bits": (pack({"a": entry("U8", [2**70], 0, 2**70)}, b"1234"), "there are 4"),
    "shape and offsets differ": (pack({"a": entry("F32", [4], 0, 4)}, b"1234"), "cannot have the 4 bytes"),
    "overlap": (pack({"a": FOUR, "b": entry("U8", [4], 2, 6)}, b"123456"), "starts at byte 2"),
    "gap": (pack({"a": FOUR, "b": entry("U8", [2], 6, 8)}, b"12345678"), "starts at byte 6"),
    "left over": (pack({"a": FOUR}, b"123456"), "cover 4 bytes of data and there are 6"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, name):
    content, reason = DAMAGED[name]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    assert reason in refused(path)


def test_a_truncated_model_is_refused(tmp_path):
    path = write_model(tmp_path, small_bert())
    path.write_bytes(path.read_bytes()[:-1])
    assert "ends at byte" in refused(path)


def test_a_file_that_shrinks_while_it_is_open_is_noticed(tmp_path):
    path = tmp_path / "shrinks.safetensors"
    size = 1 << 20
    path.write_bytes(pack({"a": entry("U8", [size], 0, size)}, bytes(size)))
    with SafetensorsFile(path) as file:
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DemoError, match=f"has {size} bytes, and {size - 1} of them"):
            file.read_into("a", bytearray(size))


# Files that are no model


def test_other_weights_are_no_bert(tmp_path):
    path = tmp_path / "other.safetensors"
    write_tensors(path, {"transformer.wte.weight": torch.zeros(2, 2)})
    assert "it has no tensor 'embeddings.word_embeddings.weight'" in refused(path)


def test_a_missing_layer_is_named(tmp_path):
    tensors = small_bert()
    del tensors["bert.encoder.layer.1.output.dense.bias"]
    assert "it has no tensor 'encoder.layer.1.output.dense.bias'" in refused(write_model(tmp_path, tensors))
    assert "and 15 more" in refused(write_model(tmp_path, small_bert(), num_hidden_layers=LAYERS + 1))


@pytest.mark.parametrize("name", ["config.json", "vocab.txt"])
def test_a_missing_file_is_named(tmp_path, name):
    path = write_model(tmp_path, small_bert())
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "describes a 'gpt2' model"),
        ({"hidden_size": None, "vocab_size": "many"}, "hidden_size, vocab_size must be there"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be there"),
        ({"num_attention_heads": 3}, "no multiple of num_attention_heads"),
        ({"hidden_act": "swish"}, "activation 'swish'"),
        ({"layer_norm_eps": "small"}, "layer_norm_eps must be a number"),
        ({"position_embedding_type": "relative_key"}, "'relative_key' positions"),
        ({"intermediate_size": 25}, "has the shape (24, 16) instead of (25, 16)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, reason):
    assert reason in refused(write_model(tmp_path, small_bert(), **changes))


@pytest.mark.parametrize(("content", "reason"), [("{", "not valid JSON"), ("[]", "not a JSON object")])
def test_a_config_that_is_no_object_is_refused(tmp_path, content, reason):
    path = write_model(tmp_path, small_bert())
    (tmp_path / "config.json").write_text(content)
    assert reason in refused(path)


def test_weights_must_be_of_one_floating_dtype(tmp_path):
    tensors = small_bert()
    tensors["bert.embeddings.LayerNorm.beta"] = torch.zeros(HIDDEN, dtype=torch.float16)
    assert "has weights of float16, float32" in refused(write_model(tmp_path, tensors))
    assert "has weights of int64" in refused(write_model(tmp_path, small_bert(torch.int64)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a\nb\n", "has no [PAD], [UNK], [CLS], [SEP]"),
        (b"\xff\xfe\n", "not a BERT vocabulary"),
        ("\n".join([*VOCABULARY, "more"]).encode(), "more tokens than vocab_size, 13"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path, content, reason):
    path = write_model(tmp_path, small_bert())
    (tmp_path / "vocab.txt").write_bytes(content)
    assert reason in refused(path)


# The tokenizer; the ids are those of the `tokenizers` package with MiniLM's own tokenizer.json


@pytest.fixture(scope="module")
def words():
    return WordPiece(default_weights().with_name("vocab.txt"))


# Each with the ids between [CLS], 101, and [SEP], 102.
KNOWN_IDS = {
    "How much does it cost to send a parcel of 5 kg to Reykjavík?": (
        "2129 2172 2515 2009 3465 2000 4604 1037 20463 1997 1019 4705 2000 28559 1029 "
    ),
    "Don't pay $3.50 for naïve mlock'ing (page-locked memory), Größe 4096!": (
        "2123 1005 1056 3477 1002 1017 1012 2753 2005 15743 19875 7432 1005 13749 1006 3931 1011 5299 "
        "3638 1007 1010 24665 2080 17499 2871 2683 2575 999 "
    ),
    "": "",
    "☃ " + "a" * 101: "100 100",
}


@pytest.mark.parametrize("sentence", KNOWN_IDS)
def test_ids_are_those_of_the_reference_tokenizer(words, sentence):
    assert words.encode(sentence, 512) == [101, *map(int, KNOWN_IDS[sentence].split()), 102]


def test_long_sentences_are_cut_and_short_ones_padded(words):
    assert words.encode("to " * 600, 512) == [101, *[2000] * 510, 102]
    ids, mask = words.encode_batch(["to", "to to"], 512)
    assert ids == [[101, 2000, 102, 0], [101, 2000, 2000, 102]]
    assert mask == [[True, True, True, False], [True] * 4]


def test_a_cased_vocabulary_keeps_case_and_accents(tmp_path):
    path = write_model(tmp_path, small_bert())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    with Checkpoint(path) as checkpoint:
        assert checkpoint.tokenizer.encode("The kitchens in", 32) == [2, 1, 8, 9, 6, 3]
    (tmp_path / "tokenizer_config.json").unlink()
    with Checkpoint(path) as checkpoint:
        assert checkpoint.tokenizer.encode("Thé kitchens in", 32) == [2, 5, 8, 9, 6, 3]
