"""GGUF files load with transformers' numbers, tokenizer included."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.checkpoints.gguf_file import hugging_face_names
from clover_jax.checkpoints.loading import load_base
from clover_jax.config import RopeConfig
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.torch_pairs import SHAPE, our_logits, random_ids, torch_logits

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.parity

# Rows are whole blocks of 32 numbers.
SIZES = SHAPE | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 70}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# llama.cpp's architecture -> transformers' class, and changes of the shape.
MODELS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 128}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3Text", GEMMA),
}
# Kinds of codes that the package can write, in turn.
KINDS = ("Q8_0", "Q4_0", "Q5_1", "F16", "BF16", "F32", "Q4_1")
WORDS = [chr(ord("a") + i) for i in range(26)] + ["Ġ", "he", "in", "er"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "clover_jax" / "gguf"


def hugging_face_model(architecture, **changes):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name, own = MODELS[architecture]
    config = getattr(transformers, f"{name}Config")(**SIZES | own | changes)
    torch.manual_seed(0)
    kind = name.removesuffix("Text")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def write(path, model, architecture, tensors=None, **metadata):
    """Write a model as llama.cpp does: its names, its order of rotated rows, its norms."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 1e6))
    writer.add_rope_dimension_count(size)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for key, value in metadata.items():
        adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        adders[type(value)](f"{architecture}.{key.replace('__', '.')}", value)
    add_vocabulary(writer, config.vocab_size)

    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[{"qwen3moe": "QWEN3MOE"}.get(architecture, architecture.upper())],
        config.num_hidden_layers,
    )
    stored = {name: value.numpy() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        stored.pop("lm_head.weight", None)
    stored = {n: v for name, value in stored.items() for n, v in parts_of(name, value).items()}
    kinds = iter(KINDS * 20)
    for name, value in stored.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        letter = name.partition("self_attn.")[2][:1]
        if architecture == "llama" and letter in ("q", "k"):
            count = heads if letter == "q" else keys
            value = value.reshape(count, 2, -1, value.shape[-1]).swapaxes(1, 2).reshape(value.shape)
        if architecture.startswith("gemma") and "norm" in name:
            value = value + 1
        kind = gguf.GGMLQuantizationType[next(kinds) if value.ndim > 1 else "F32"]
        quantized = gguf.quantize(np.ascontiguousarray(value), kind)
        writer.add_tensor(theirs, quantized, raw_dtype=kind)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    end_file(writer)
    return str(path)


def end_file(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts_of(name, value):
    """Transformers' experts in one tensor each for gate and up, as llama.cpp has them."""
    if not name.endswith("experts.gate_up_proj"):
        end = "" if name.endswith(("weight", "bias")) else ".weight"
        return {f"{name}{end}": value}
    halves = np.split(value, 2, axis=1)
    stem = name.removesuffix("gate_up_proj")
    return {f"{stem}{half}_proj.weight": x for half, x in zip(("gate", "up"), halves, strict=True)}


def add_vocabulary(writer, size):
    tokens = ["<unk>", "<s>", "</s>", *WORDS]
    tokens += [f"x{i}" for i in range(size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (size - 3))
    writer.add_token_merges(["h e", "i n", "e r"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def read_by_transformers(path, model):
    """Return the model with the weights that transformers reads of a file.

    Its reader of configs does not know that Gemma's scores are scaled by the heads' width.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    parsed = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    theirs = type(model)(model.config).eval()
    found = theirs.load_state_dict(parsed["tensors"], strict=False)
    assert found.missing_keys in ([], ["lm_head.weight"])
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_are_those_of_transformers_reader(tmp_path, architecture):
    model = hugging_face_model(architecture)
    path = write(tmp_path / "tiny.gguf", model, architecture)
    base, ids = load_base(path), random_ids(40, 70)
    expected = torch_logits(read_by_transformers(path, model), ids)
    np.testing.assert_allclose(our_logits(base, [ids])[0], expected, atol=1e-4)
    # Read as a mesh does, a part at a time.
    again = load_base(path, place=in_halves)
    jax.tree.map(np.testing.assert_array_equal, again.params, base.params)


def in_halves(path, leaf):
    axis, half = len(leaf.shape) - 1, leaf.shape[-1] // 2
    before = (slice(None),) * axis
    parts = [leaf[(*before, part)] for part in (slice(0, half), slice(half, None))]
    return jnp.asarray(np.concatenate(parts, axis), jnp.float32)


def test_the_tokenizer_is_transformers_and_the_folder_is_made_once(tmp_path, cache, capsys):
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path / "tiny.gguf", hugging_face_model("qwen2"), "qwen2")
    ours = load_tokenizer(load_base(path).directory)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    text = "<s>in her cabin"
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.eos_token_id == 2
    assert ours.chat_template == theirs.chat_template
    assert "reading its metadata" in capsys.readouterr().err
    load_base(path)
    assert "reading its metadata" not in capsys.readouterr().err
    assert len(list(cache.iterdir())) == 1


def test_rope_frequencies_of_llama_3_are_read_from_their_tensor(tmp_path):
    """llama.cpp stores Llama 3's scaling as a factor for each pair of numbers."""
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    model = hugging_face_model("llama", rope_parameters=llama3)
    plain = 5e5 ** (-np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() == pytest.approx(8)
    tensors = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write(tmp_path / "tiny.gguf", model, "llama", tensors)
    base, ids = load_base(path), random_ids(100, 70)
    assert base.config.max_position_embeddings == 128
    scaled = our_logits(base, [ids])[0]
    # The same weights with the rule itself.
    values = json.loads((base.directory / "config.json").read_text())
    edited = values | {"rope_scaling": None, "rope_parameters": llama3}
    (base.directory / "config.json").write_text(json.dumps(edited))
    np.testing.assert_allclose(scaled, our_logits(load_base(path), [ids])[0], atol=1e-4)


def test_scaling_by_metadata(tmp_path):
    metadata = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    path = write(tmp_path / "tiny.gguf", hugging_face_model("qwen2"), "qwen2", **metadata)
    rope = load_base(path).config.rope
    assert rope == RopeConfig(theta=rope.theta, kind="linear", factor=4.0)
    metadata |= {"rope__scaling__type": "yarn", "rope__scaling__original_context_length": 32}
    path = write(tmp_path / "tiny.gguf", hugging_face_model("qwen2"), "qwen2", **metadata)
    assert load_base(path).config.rope.original_max_position_embeddings == 32


def test_broken_files_and_other_architectures_are_refused(tmp_path):
    path = tmp_path / "tiny.gguf"
    end_file(gguf.GGUFWriter(path, "mamba"))
    message = "a GGUF file of architecture 'mamba' is not read, only llama, qwen2, qwen3"
    with pytest.raises(UserError, match=message):
        load_base(str(path))
    for content, message in ((path.read_bytes()[:40], ""), (b"text" * 100, "GGUF magic inv")):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"is not a whole GGUF file: {message}"):
            load_base(str(path))


def test_unknown_scaling_and_metadata_are_named(tmp_path, capsys):
    model = hugging_face_model("qwen2")
    with pytest.raises(UserError, match=r"rope.scaling.type 'odd' is not read, only linear and y"):
        load_base(write(tmp_path / "a.gguf", model, "qwen2", rope__scaling__type="odd"))
    load_base(write(tmp_path / "b.gguf", model, "qwen2", attention__scale=0.5))
    assert "metadata of qwen2 that are not read: attention.scale" in capsys.readouterr().err


def test_the_example_of_names():
    names = hugging_face_names("blk.3.attn_q.weight", "llama", 0)
    assert names == ["model.layers.3.self_attn.q_proj.weight"]
