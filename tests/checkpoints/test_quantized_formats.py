"""Quantized checkpoints load with the numbers of their own library's dequantizer."""

import json
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax.checkpoints.base import fingerprint
from clover_jax.checkpoints.llama_tensors import base_leaves
from clover_jax.checkpoints.loading import load_base, open_base, read_checkpoint
from clover_jax.checkpoints.quantization import load_quantized_base
from clover_jax.checkpoints.quantized_formats import unpack
from clover_jax.checkpoints.tensor_map import LazyTensor, stored_shapes
from clover_jax.config import BaseConfig
from clover_jax.errors import UserError
from experiments.tiny_base.base_folder import llama_config_values
from tests.tiny_checkpoints import assert_trees_equal, edit_tensors

# Numbers of columns that are no multiples of all groups and words.
SIZES = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2}
BASE = BaseConfig(**SIZES, num_heads=4, num_kv_heads=2, head_dim=16)
RNG = np.random.default_rng(0)


class Format(NamedTuple):
    """A format.

    config: its quantization_config.
    store: makes of a matrix [O, I] its stored tensors, by the ends of their names, and the matrix
        that these stand for, by the format's own library or its definition.
    others: further ways to store, by the end of a module's name.
    """

    config: dict[str, Any]
    store: Callable[[np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]
    others: Mapping[str, Callable] = types.MappingProxyType({})


def write(folder, fmt, quantizes_lm_head=False):
    """Write a quantized folder, and next to it what its own library makes of it."""
    (quantized := folder / "quantized").mkdir()
    (plain := folder / "plain").mkdir()
    stored, wide = {}, {}
    for name, shape in stored_shapes(base_leaves(BASE)).items():
        matrix = RNG.normal(size=shape).astype(np.float32)
        stem = name.removesuffix(".weight")
        # Configs leave some modules out.
        is_plain = "_proj" not in name or "layers.1.mlp.down_proj" in name
        is_plain &= not (quantizes_lm_head and name == "lm_head.weight")
        store = next((fmt.others[end] for end in fmt.others if stem.endswith(end)), fmt.store)
        parts, matrix = ({".weight": matrix}, matrix) if is_plain else store(matrix)
        stored |= {stem + end: np.ascontiguousarray(part) for end, part in parts.items()}
        wide[name] = np.ascontiguousarray(matrix.astype(np.float32))
    values = llama_config_values(BASE)
    (plain / "config.json").write_text(json.dumps(values))
    (quantized / "config.json").write_text(json.dumps(values | {"quantization_config": fmt.config}))
    save_file(wide, plain / "model.safetensors")
    save_stored(stored, quantized / "model.safetensors")
    return str(quantized), str(plain)


def save_stored(tensors, path):
    """Write tensors of which some are FP8, which NumPy's writer of safetensors does not know."""
    import torch
    from safetensors.torch import save_file as save_torch

    def converted(array):
        if array.dtype == ml_dtypes.float8_e4m3fn:
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(array)

    save_torch({name: converted(array) for name, array in tensors.items()}, path)


def to_numpy(tensor):
    """Return a torch tensor as an array, FP8 as ml_dtypes has it."""
    import torch

    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def store_fp8(block):
    def store(matrix):
        import torch
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        rows, columns = matrix.shape
        grid = [size // step for size, step in zip(matrix.shape, block, strict=True)]
        blocks = matrix.reshape(grid[0], block[0], grid[1], block[1])
        scale = np.abs(blocks).max((1, 3)) / 448
        weight = (blocks / scale[:, None, :, None]).reshape(rows, columns)
        weight = weight.astype(ml_dtypes.float8_e4m3fn)
        torch_weight = torch.from_numpy(weight.view(np.uint8)).view(torch.float8_e4m3fn)
        wide = Fp8Dequantize(None)._dequantize_one(torch_weight, torch.from_numpy(scale))
        return {".weight": weight, ".weight_scale_inv": scale}, wide.numpy()

    return store


def store_compressed(**arguments):
    """Store as compressed-tensors does; `arguments` are those of a weight."""

    def store(matrix):
        import torch
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        args, form = dict(arguments), arguments["form"]
        del args["form"]
        args = QuantizationArgs(**args)
        inputs = None
        if form in ("int-quantized", "float-quantized"):
            inputs = QuantizationArgs(num_bits=8, type=args.type, strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        weight = torch.from_numpy(matrix)
        # Smallest and largest entry of each group, by the strategy.
        rows, columns = matrix.shape
        groups = {
            "channel": (rows, 1),
            "tensor": (1, 1),
            "group": (rows, columns // (args.group_size or 1)),
            "tensor_group": (rows, columns // (args.group_size or 1)),
            "block": tuple(np.array(matrix.shape) // (args.block_structure or 1)),
        }[args.strategy]
        parts = weight.reshape(groups[0], rows // groups[0], groups[1], columns // groups[1])
        least, most = parts.amin((1, 3)), parts.amax((1, 3))
        state = {"weight": weight}
        extra = {}
        if args.strategy == "tensor_group":
            extra["global_scale"] = state["weight_global_scale"] = generate_gparam(
                weight.min(), weight.max()
            )
        scale, zero = calculate_qparams(least, most, args, **extra)
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        wide = compressor.decompress(dict(stored), scheme)["weight"]
        return {f".{name}": to_numpy(part) for name, part in stored.items()}, to_numpy(wide)

    weights = {k: v for k, v in arguments.items() if k != "form"}
    config = {
        "quant_method": "compressed-tensors",
        "format": arguments["form"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*layers.1.mlp.down_proj"],
    }
    return Format(config, store)


def packed_words(codes, bits):
    """Pack [rows, n] codes into words of 32 bits, the first in the lowest bits."""
    rows, count = codes.shape
    words = np.zeros((rows, -(-count * bits // 32)), np.uint32)
    for row in range(rows):
        whole = sum(int(code) << (bits * index) for index, code in enumerate(codes[row]))
        words[row] = [(whole >> (32 * index)) & 0xFFFFFFFF for index in range(words.shape[1])]
    return words.view(np.int32)


def rounded_to_groups(matrix, bits, groups):
    """Round a matrix [O, I] to codes; return them, scales and zero points [G, O]."""
    most, number = 2**bits - 1, int(groups.max()) + 1
    scale, zero = np.zeros((2, number, len(matrix)), np.float32)
    for group in range(number):
        part = matrix[:, groups == group]
        scale[group] = (part.max(1) - part.min(1)) / most
        zero[group] = np.clip(np.round(-part.min(1) / scale[group]), 1, most)
    scale = scale.astype(np.float16)
    wide_scale, wide_zero = scale.astype(np.float32).T[:, groups], zero.T[:, groups]
    codes = np.clip(np.round(matrix / wide_scale) + wide_zero, 0, most)
    return codes.astype(int), scale, zero.astype(int), (codes - wide_zero) * wide_scale


def gptq(bits, size, version, is_ordered):
    """GPTQ as AutoGPTQ stores it: words down the inputs; the first version has zeros less 1."""

    def store(matrix):
        inputs = matrix.shape[1]
        groups = np.arange(inputs) // (size or inputs)
        if is_ordered:
            groups = RNG.permutation(groups)
        codes, scale, zero, wide = rounded_to_groups(matrix, bits, groups)
        less = 1 if version == "gptq" else 0
        return {
            ".qweight": packed_words(codes, bits).T,
            ".qzeros": packed_words(zero - less, bits),
            ".scales": scale,
            ".g_idx": groups.astype(np.int32),
        }, wide

    config = {"quant_method": "gptq", "bits": bits, "group_size": size or -1}
    return Format(config | {"checkpoint_format": version, "desc_act": is_ordered}, store)


def store_awq(matrix):
    """AWQ as AutoAWQ stores it: nibble k of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[k]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    codes, scale, zero, wide = rounded_to_groups(matrix, 4, np.arange(matrix.shape[1]) // 32)

    def packed(rows):
        return packed_words(rows.reshape(len(rows), -1, 8)[..., order].reshape(rows.shape), 4)

    return {".qweight": packed(codes.T), ".qzeros": packed(zero), ".scales": scale}, wide


def store_modelopt(matrix):
    """NVFP4 as ModelOpt stores it: two numbers of four bits a byte, two levels of scales."""
    rows, columns = matrix.shape
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    whole = np.float32(np.abs(matrix).max() / 6 / 448)
    groups = matrix.reshape(rows, -1, 16)
    scale = (np.abs(groups).max(-1) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
    wide_scale = scale.astype(np.float32)[..., None] * whole
    codes = np.abs(groups[..., None] / wide_scale[..., None] - values).argmin(-1)
    pairs = codes.reshape(rows, columns // 2, 2)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    wide = (values[codes] * wide_scale).reshape(matrix.shape)
    return {".weight": packed, ".weight_scale": scale, ".weight_scale_2": whole[None]}, wide


def store_modelopt_fp8(block, form, end=".weight_scale"):
    """FP8 as ModelOpt stores it. block: rows and columns, None for all; form: of the scales."""

    def store(matrix):
        rows, columns = matrix.shape
        high, wide = (part or size for part, size in zip(block, matrix.shape, strict=True))
        parts = matrix.reshape(rows // high, high, columns // wide, wide)
        scale = np.abs(parts).max((1, 3), keepdims=True) / np.float32(448)
        codes = (parts / scale).astype(ml_dtypes.float8_e4m3fn)
        matrix = (codes.astype(np.float32) * scale).reshape(rows, columns)
        return {".weight": codes.reshape(rows, columns), end: scale[form]}, matrix

    return store


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
# As ModelOpt writes a config.json; each module has its own way.
WAYS = {
    "self_attn.q_proj": {"quant_algo": "FP8"},
    "self_attn.k_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "self_attn.v_proj": {"quant_algo": "FP8_PB_WO", "group_size": 16},
    "self_attn.o_proj": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 16},
    "mlp.gate_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
    "mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
}
LAYERS = {f"model.layers.{i}.{name}": way for i in range(2) for name, way in WAYS.items()}
del LAYERS["model.layers.1.mlp.down_proj"]
MODELOPT_MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []}
MODELOPT_MIXED |= {"quantized_layers": LAYERS}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS = {
    "fp8 by blocks": Format(FP8 | {"weight_block_size": [32, 16]}, store_fp8((32, 16))),
    "fp8 by rows": Format(FP8 | {"weight_block_size": None}, store_fp8((1, 32))),
    "int8 channels": store_compressed(
        form="int-quantized", num_bits=8, type="int", strategy="channel"
    ),
    "int8 channels with zeros": store_compressed(
        form="int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    ),
    "fp8 channels": store_compressed(
        form="float-quantized", num_bits=8, type="float", strategy="channel"
    ),
    "fp8 tensors": store_compressed(
        form="float-quantized", num_bits=8, type="float", strategy="tensor"
    ),
    "fp8 blocks": store_compressed(
        form="float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    ),
    "int4 groups": store_compressed(form="pack-quantized", **INT4),
    "int4 groups with zeros": store_compressed(form="pack-quantized", symmetric=False, **INT4),
    "int3 channels": store_compressed(
        form="pack-quantized", num_bits=3, type="int", strategy="channel"
    ),
    "int8 packed": store_compressed(
        form="pack-quantized", num_bits=8, type="int", strategy="group", group_size=16
    ),
    "nvfp4": store_compressed(
        form="nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=16,
        scale_dtype="torch.float8_e4m3fn",
    ),
    "nvfp4 of modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, store_modelopt
    ),
    "nvfp4, fp8 and more of modelopt": Format(
        MODELOPT_MIXED,
        store_modelopt,
        {
            "q_proj": store_modelopt_fp8((None, None), (0, 0, 0, 0)),
            "k_proj": store_modelopt_fp8((1, None), np.s_[:, 0, 0, 0]),
            "v_proj": store_modelopt_fp8((16, 16), ...),
            "o_proj": store_modelopt_fp8((16, 16), np.s_[:, 0, :, 0], ".weight_scale_inv"),
        },
    ),
    "gptq": gptq(4, 32, "gptq", False),
    "gptq, ordered": gptq(4, 32, "gptq", True),
    "gptq v2, ordered, 8 bits": gptq(8, 16, "gptq_v2", True),
    "gptq of 2 bits, one group": gptq(2, None, "gptq", False),
    "gptq of 3 bits": gptq(3, 32, "gptq", False),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, store_awq
    ),
}
# Largest relative difference: compressed-tensors computes NVFP4 in bfloat16.
ROUNDED = {"nvfp4": 2**-8}


@pytest.fixture(params=FORMATS)
def folders(request, tmp_path):
    pytest.importorskip("torch")
    return request.param, *write(tmp_path, FORMATS[request.param])


pytestmark = pytest.mark.parity


def in_parts(path, leaf):
    """Read a leaf as a mesh does: halves of its first axis, halves of its last."""
    for axis in {0, len(leaf.shape) - 1}:
        half = leaf.shape[axis] // 2
        before = (slice(None),) * axis
        after = (slice(None),) * (len(leaf.shape) - axis - 1)
        parts = [leaf[(*before, part, *after)] for part in (slice(0, half), slice(half, None))]
        whole = np.concatenate(parts, axis)
    return jnp.asarray(whole, jnp.float32)


def test_weights_are_those_of_the_formats_own_dequantizer(folders, capsys):
    name, quantized, plain = folders
    found, expected = load_base(quantized).params, load_base(plain).params
    assert "are dequantized as they are read" in capsys.readouterr().err
    assert_trees_equal(load_base(quantized, place=in_parts).params, found)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=ROUNDED.get(name, 0), atol=0)


def test_int8_and_fingerprints_are_those_of_the_widened_weights(tmp_path):
    quantized, plain = write(tmp_path, FORMATS["gptq, ordered"], quantizes_lm_head=True)
    for parts in (("base",), ("draft",)):
        bases = (load_quantized_base(x, jnp.bfloat16, None, parts) for x in (quantized, plain))
        found, expected = bases
        jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
        assert found.lm_head_hash == expected.lm_head_hash
    assert fingerprint(open_base(quantized)) == fingerprint(open_base(plain))


ALL = slice(None)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[4:20].reshape((4, 4, 5, 6)).transpose((1, 3, 0, 2))[1:3, :, 2],
        lambda x: x[:, 3::2][5:9].transpose((1, 0)),
        lambda x: x.reshape((6, 4, 30)).transpose((2, 0, 1))[7, 1:5],
        lambda x: x[23:, 29:],
    ],
)
def test_a_lazy_tensor_is_the_view_of_an_array_and_computes_little_more(view):
    whole, boxes = np.arange(24 * 30).reshape(24, 30), []

    def read(box):
        boxes.append(box)
        return whole[box].copy()

    lazy, expected = view(LazyTensor(whole.shape, read)), view(whole)
    assert lazy.shape == expected.shape
    assert not boxes
    np.testing.assert_array_equal(lazy, expected)
    # The smallest box that holds all of it.
    (box,) = boxes
    rows, columns = np.divmod(expected, 30)
    assert box == tuple(slice(int(x.min()), int(x.max()) + 1) for x in (rows, columns))


def test_the_example_of_unpack():
    words = np.array([[0x21, 0x43]], np.uint8)
    np.testing.assert_array_equal(unpack(words, 4, np.array([0, 3])), [[1, 4]])


def change(name, **changes):
    """Return the format's config with these changes."""
    return FORMATS[name].config | changes


INT4_GROUP = FORMATS["int4 groups"].config["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantized with 'bitsandbytes' are not suppor"),
        ({"bits": 4}, "weights quantized with None are not supported, only fp8, compressed-tens"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' of quantization_config is not supported, only e4m3;"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size must be two numbers, rows and c"),
        (change("int4 groups", config_groups=[]), r"config_groups must say how weights are sto"),
        (change("gptq", checkpoint_format="marlin"), "'marlin' .* only gptq, gptq_v2; use an unq"),
        (change("awq", version="gemv"), "version 'gemv' of quantization_config .* only gemm;"),
        (change("awq", bits=8), "bits 8 of quantization_config is not supported, only 4;"),
        (change("int4 groups", format="marlin-24"), "format 'marlin-24' .* only int-quantized"),
        (change("int4 groups", transform_config={"a": 1}), "transform_config {'a': 1} of quant"),
        (change("int4 groups", config_groups={"W4A16": ["Linear"]}), "config_groups must say how"),
        (
            change("int4 groups", config_groups={"g": INT4_GROUP | {"format": "mxfp4"}}),
            "format 'mxfp4' of quantization_config is not supported, only int-quantized",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo 'W4A8' .* only fp8, fp8_"),
        (
            MODELOPT_MIXED
            | {"quantized_layers": LAYERS | {"lm_head": {"quant_algo": "W4A16_AWQ"}}},
            "quant_algo of lm_head 'W4A16_AWQ' of quantization_config is not supported, only fp",
        ),
        (
            MODELOPT_MIXED | {"quantized_layers": LAYERS | {"lm_head": {}}},
            "quant_algo of lm_head '' of quantization_config is not supported",
        ),
        (
            MODELOPT_MIXED | {"quantized_layers": None},
            "mixed_precision needs quantized_layers, an object with the quant_algo of each mod",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, config, message):
    values = llama_config_values(BASE) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message):
        read_checkpoint(tmp_path)


QUERY = "model.layers.0.self_attn.q_proj"


def cut(end, *axes):
    """Return an edit that leaves the tensor of this name without its last entries."""

    def edit(tensors):
        for axis in axes:
            name = QUERY + end
            tensors[name] = np.delete(tensors[name], -1, axis).copy()

    return edit


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", lambda t: t.pop(f"{QUERY}.g_idx"), f"lacks tensor {QUERY}.weight, which its con"),
        ("gptq", lambda t: t[f"{QUERY}.g_idx"].fill(9), r"entries name \(64, 10\) groups, and"),
        ("gptq", cut(".qweight", 0), r"words for 64 inputs .*qweight \(7, 64\), .*qzeros"),
        ("gptq", cut(".scales", 0), r"name \(64, 2\) groups, and scales are \(64, 1\); the t"),
        ("awq", cut(".qweight", 1), "words of 8 codes do not make 64 outputs"),
        ("awq", cut(".scales", 1), "words of 8 codes do not make 63 outputs"),
        ("int4 groups", cut(".weight_packed", 1), r"64 x 64 integers of \(4,\) bits do not fit"),
        ("int4 groups", cut(".weight_scale", 0), "64 rows or columns do not make 63 groups"),
        ("int8 channels", cut(".weight_scale", 0), "64 rows or columns do not make 63 groups"),
        (
            "int8 channels",
            lambda t: t.update({f"{QUERY}.weight": t[f"{QUERY}.weight"].astype(np.float32)}),
            r"a matrix in int8 or FP8 cannot be float32 of shape \(64, 64\)",
        ),
        ("int8 channels", lambda t: t[f"{QUERY}.weight_scale"].fill(np.nan), f"{QUERY}.weight hol"),
        ("int8 channels", cut(".weight", 1), r"q_proj.weight has shape \(64, 63\); config.json as"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path, name, edit, message):
    quantized, _ = write(tmp_path, FORMATS[name])
    edit_tensors(tmp_path / "quantized", edit)
    with pytest.raises(UserError, match=message):
        load_base(quantized)


def test_nvfp4_of_several_matrices_in_one_tensor_is_refused(tmp_path):
    fmt = FORMATS["nvfp4 of modelopt"]

    def together(matrix):
        stored, wide = fmt.store(matrix)
        return stored | {".weight": stored[".weight"][None]}, wide

    quantized, _ = write(tmp_path, fmt._replace(others={"q_proj": together}))
    with pytest.raises(UserError, match=r"in NVFP4 cannot be uint8 of shape \(1, 64, 32\)"):
        load_base(quantized)


def test_scales_of_activations_are_named_and_left_out(tmp_path, capsys):
    quantized, plain = write(tmp_path, FORMATS["int8 channels"])
    one = np.ones(1, np.float32)
    scales = {f"{QUERY}.input_scale": one, "model.layers.0.self_attn.k_scale": one.copy()}
    edit_tensors(tmp_path / "quantized", lambda tensors: tensors.update(scales))
    found = load_base(quantized).params
    said = capsys.readouterr().err
    assert "2 tensors that only quantized activations need are not read, such as model." in said
    assert "not needed of quantization_config: ignore" in said
    assert_trees_equal(found, load_base(plain).params)
