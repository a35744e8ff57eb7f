"""A base's own drafting layer gives the numbers of torch's layers, drafts and can be trained."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.checkpoints.layouts import LAYOUTS
from clover_jax.checkpoints.loading import load_base
from clover_jax.checkpoints.stored_head import load_draft, open_head, write_foreign
from clover_jax.drafters.drafter import frozen_from_base
from clover_jax.errors import UserError
from clover_jax.models.batch import Batch
from clover_jax.training.run import restore_or_init
from clover_jax.training.step import OptimizerConfig, TrainStepConfig, make_train_step
from tests.tiny_checkpoints import copy_of, edit_json, edit_tensors
from tests.tiny_models import decoded, random_prompts, texts_of
from tests.torch_pairs import CLOSE, SHAPE, random_ids, save_random_model
from tests.training.training_data import random_batch

pytestmark = pytest.mark.parity

HYBRID = {"num_hidden_layers": 4, "head_dim": 16, "pad_token_id": 0, "initializer_range": 0.1}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 12}
HYBRID |= {"linear_value_head_dim": 8, "eos_token_id": None, "vocab_size": 96}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 40}
# transformers' class -> changes of the shape, and the module of its layers.
MODELS = {
    "Qwen3_5Text": (HYBRID, "qwen3_5", "Qwen3_5"),
    "Qwen3_5MoeText": (HYBRID | EXPERTS, "qwen3_5_moe", "Qwen3_5Moe"),
    "Qwen3Next": (HYBRID | EXPERTS, "qwen3_next", "Qwen3Next"),
}


class Reference:
    """The layer in torch: transformers' own decoder layer and norms, put together as in vLLM."""

    def __init__(self, model, name, stacked=False):
        import importlib

        import torch

        self.stacked = stacked
        _, module, prefix = MODELS[name]
        classes = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        self.torch, self.model, config = torch, model, model.config
        norm = getattr(classes, f"{prefix}RMSNorm")
        full = config.layer_types.index("full_attention")
        self.layers = torch.nn.ModuleList([getattr(classes, f"{prefix}DecoderLayer")(config, full)])
        self.modules = {
            "fc": torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False),
            "pre_fc_norm_embedding": norm(config.hidden_size, eps=config.rms_norm_eps),
            "pre_fc_norm_hidden": norm(config.hidden_size, eps=config.rms_norm_eps),
            "norm": norm(config.hidden_size, eps=config.rms_norm_eps),
            "layers": self.layers,
        }
        with torch.no_grad():
            for module in self.modules.values():
                for parameter in module.parameters():
                    parameter.normal_(std=0.2)
        # It has no cache: its keys are those of the tokens that it is given.
        self.layers[0].self_attn.layer_idx = 0

    def tensors(self):
        """Return the tensors as they are published, experts one by one or, "-stacked", together."""
        found = {}
        for name, module in self.modules.items():
            for key, value in module.state_dict().items():
                named = {f"mtp.{name}.{key}": value.detach().numpy()}
                found |= named if self.stacked else one_by_one(*named.popitem())
        return found

    def step(self, tokens, states):
        """Return o for tokens x_1.. and states of the positions before them, [T, D]."""
        torch, modules = self.torch, self.modules
        with torch.no_grad():
            embedded = self.model.model.embed_tokens(torch.tensor([tokens]))
            both = [modules["pre_fc_norm_embedding"](embedded)]
            both.append(modules["pre_fc_norm_hidden"](torch.tensor(np.array(states))[None]))
            x = modules["fc"](torch.cat(both, dim=-1))
            positions = torch.arange(len(tokens))[None]
            rotation = self.model.model.rotary_emb(x, positions[None].expand(3, 1, -1))
            if rotation[0].ndim == 4:
                rotation = self.model.model.rotary_emb(x, positions)
            mask = torch.full((1, 1, len(tokens), len(tokens)), -1e9).triu(1)
            x = self.layers[0](x, position_embeddings=rotation, attention_mask=mask)
            x = x[0] if isinstance(x, tuple) else x
            return modules["norm"](x)[0].numpy()


def one_by_one(name, value):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    stem, side = name.rsplit(".", 1)
    found = {}
    for index, matrix in enumerate(value):
        sides = {"down_proj": matrix}
        if side == "gate_up_proj":
            sides = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
        for own, part in sides.items():
            found[f"{stem}.{index}.{own}.weight"] = np.ascontiguousarray(part)
    return found


# The dense one by default, those with experts when asked for.
PARAMS = [
    name if name == "Qwen3_5Text" else pytest.param(name, marks=pytest.mark.slow)
    for name in (*MODELS, "Qwen3_5MoeText-stacked")
]


@pytest.fixture(scope="module", params=PARAMS)
def base_and_reference(request, tmp_path_factory):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    name = request.param.removesuffix("-stacked")
    kind = name.removesuffix("Text")
    config = getattr(transformers, f"{name}Config")(**SHAPE | MODELS[name][0])
    folder = tmp_path_factory.mktemp(kind)
    model = save_random_model(getattr(transformers, f"{kind}ForCausalLM")(config), folder)
    reference = Reference(model, name, stacked=name != request.param)
    edit_tensors(folder, lambda tensors: tensors.update(reference.tensors()))
    return load_base(str(folder)), reference


def test_states_are_those_of_torchs_layers_at_every_depth(base_and_reference):
    base, reference = base_and_reference
    draft, ids = load_draft("mtp", base), random_ids(12, 96)
    states = np.random.default_rng(0).normal(size=(12, 32)).astype(np.float32)
    one = jnp.ones((1, 12), jnp.int32)
    batch = Batch(jnp.array([ids]), one, jnp.arange(12)[None], one > 0)
    arguments = (frozen_from_base(base.params), jnp.asarray(states[None]), batch, None)
    apply = jax.jit(lambda p: draft.head.module.apply(p, *arguments, method="train_forward"))
    found = apply({"params": draft.params})

    np.testing.assert_allclose(found[0, 0, :11], reference.step(ids[1:], states[:11]), **CLOSE)
    # The second step at t reads the first one's output at t, behind the states up to t.
    for t in (0, 4, 8):
        outputs = reference.step(ids[1 : t + 2], states[: t + 1])
        again = reference.step(ids[1 : t + 3], [*states[: t + 1], outputs[-1]])
        np.testing.assert_allclose(found[1, 0, t], again[-1], **CLOSE)


def test_the_text_is_plain_decodings_with_trees_of_any_depth(base_and_reference):
    base, _ = base_and_reference
    draft, prompts = load_draft("mtp", base), random_prompts(4, seed=3)
    usual = {"config": base.config, "base": base.params, "batch_size": 2}
    plain = texts_of(decoded(None, "none", prompts, 16, **usual))
    for tree in ("chain:6", "dynamic:12:5:3"):
        rows = decoded((draft.head, draft.params), tree, prompts, 16, **usual)
        assert texts_of(rows) == plain


def test_a_run_begins_as_the_stored_layer_and_writes_it_back(base_and_reference, tmp_path):
    base, reference = base_and_reference
    stored = open_head("mtp", base)
    train = TrainStepConfig(base.config, load_draft("mtp", base).head, OptimizerConfig(10, 5e-3, 0))
    state, _ = restore_or_init(train, base, 0, NoCheckpoints(), None)
    begun = load_draft("mtp", base).params
    jax.tree.map(np.testing.assert_array_equal, state.params, begun)
    state, metrics = make_train_step(train)(state, base.params, random_batch())
    assert np.isfinite(metrics.loss)

    write_foreign(tmp_path / "out", stored, LAYOUTS["mtp"], base)
    written, published = load_file(tmp_path / "out" / "model.safetensors"), reference.tensors()
    assert written.keys() == published.keys()
    for name, tensor in published.items():
        np.testing.assert_allclose(written[name], tensor, atol=1e-6, err_msg=name)
    # What was written is a draft by itself, too.
    again = load_draft(tmp_path / "out", base).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), again, begun)


class NoCheckpoints:
    def restore(self, state, batches):
        return None


def test_a_base_without_the_layer_is_named(base_and_reference, tmp_path):
    base, _ = base_and_reference
    folder = copy_of(base.directory, tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if "mtp." not in name}
    save_file(without, folder / "model.safetensors")
    without = load_base(str(folder))
    with pytest.raises(UserError, match=r"lacks tensors mtp\.fc\.weight, mtp\.pre_fc_norm_embeddi"):
        load_draft("mtp", without)
    edit_json(folder / "config.json", mtp_num_hidden_layers=2)
    with pytest.raises(UserError, match="mtp_num_hidden_layers is 2; only 1 is read"):
        load_draft("mtp", without)


def test_of_other_families_only_a_trained_one_can_be_had(fixtures_dir):
    base = load_base(str(fixtures_dir / "clover2_reference" / "base"))
    with pytest.raises(UserError, match="family brings no drafting layer .* train --drafter=mtp"):
        load_draft("mtp", base)
