r"""Our rollouts in tunix: the same params, log-probabilities and greedy texts, and its own GRPO.

pip install --no-deps --target=DIR google-tunix==0.1.7 google-metrax clu wrapt perfetto pandas qwix
PYTHONPATH=DIR python -m pytest -n0 -m servers tests/experiments/test_tunix_rollout.py
"""

import dataclasses
import functools
import importlib.util
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformers import AutoTokenizer

from clover_jax.checkpoints.base import BaseModel
from clover_jax.checkpoints.stored_head import Draft
from clover_jax.config import RopeConfig
from clover_jax.decoding.models import Models
from clover_jax.decoding.tree_config import parse_tree
from clover_jax.errors import UserError
from clover_jax.models.decoder import Decoder, base_logits, causal_mask
from tests.tiny_checkpoints import assert_trees_equal
from tests.tiny_folders import SPEAKING
from tests.tiny_models import random_base, random_head
from tests.tiny_tokenizers import save_byte_level

if importlib.util.find_spec("tunix") is None:
    pytest.skip("needs tunix", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import qwix
    from flax import nnx
    from tunix.generate.tokenizer_adapter import TokenizerAdapter
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen3 import model as qwen3
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    from experiments.rollouts.tunix_rollout import TunixRollout, flattened, params_of, state_of

pytestmark = [pytest.mark.servers, pytest.mark.filterwarnings("ignore")]
LLAMA = dataclasses.replace(SPEAKING, rope=RopeConfig(theta=1e6), rms_norm_eps=1e-6)
QWEN3 = dataclasses.replace(LLAMA, query_key_norm=True, tie_word_embeddings=True)
MODELS = {"llama": (LLAMA, llama3.Llama3, llama3), "qwen3": (QWEN3, qwen3.Qwen3, qwen3)}
PROMPTS = ["what is a hat", "the"]


def actor_like(name, params=None):
    """Return tunix's model of a tiny base, with our params if they are given."""
    config, model, module = MODELS[name]
    tied = "weight_tying" if name == "llama" else "use_tied_embedding"
    theirs = module.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        num_kv_heads=config.num_kv_heads,
        rope_theta=1_000_000,
        norm_eps=config.rms_norm_eps,
        **{tied: config.tie_word_embeddings},
    )
    actor = model(theirs, rngs=nnx.Rngs(0))
    if params is not None:
        flat, state = state_of(config, params), nnx.to_flat_state(nnx.state(actor, nnx.Param))
        assert len(flat) == len(list(state))
        for path, leaf in state:
            leaf[...] = flat[".".join(map(str, path))]
        nnx.update(actor, nnx.from_flat_state(state))
    return actor


def logits_of(config, params, tokens):
    mask = causal_mask(*tokens.shape)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    output = Decoder(config).apply({"params": params}, tokens, positions, mask)
    return base_logits(config, params, output.hidden["post_norm"])


def same_logits(config, params, actor):
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, config.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    graph, state = nnx.split(actor)
    inputs = tokens, positions, None, causal_mask(2, 9)
    theirs, _ = jax.jit(lambda state: nnx.merge(graph, state)(*inputs))(state)
    np.testing.assert_allclose(logits_of(config, params, tokens), theirs, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_params_go_there_and_back(name):
    config, params = MODELS[name][0], random_base(MODELS[name][0])
    actor = actor_like(name, params)
    back = params_of(config, flattened(nnx.state(actor, nnx.Param)))
    assert_trees_equal(back, params)
    same_logits(config, params, actor)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = save_byte_level(tmp_path_factory.mktemp("tokenizer"))
    base = BaseModel(QWEN3, random_base(QWEN3), folder, "random")
    draft = Draft(*random_head(QWEN3), None, {}, "random")
    return Models(base, AutoTokenizer.from_pretrained(folder), draft, parse_tree("chain:2"))


def rollout_of(models, actor, config, **options):
    tokenizer = TokenizerAdapter(models.tokenizer)
    given = {"rollout_actor": actor, "tokenizer": tokenizer, "rollout_config": config}
    return TunixRollout(**given, mesh=None, models=models, **options)


def test_lora_is_merged(models):
    names = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    rules = qwix.LoraProvider(module_path=f".*({names})", rank=2, alpha=6.0)
    actor = actor_like("qwen3", models.base.params)
    actor = qwix.apply_lora_to_model(actor, rules, **actor.get_model_input(), rngs=nnx.Rngs(1))
    lora = nnx.state(actor, nnx.LoRAParam)
    assert len(jax.tree.leaves(lora)) == 2 * 7 * QWEN3.num_layers

    rollout = rollout_of(models, actor, RolloutConfig(), lora_alpha=6.0)
    nnx.update(actor, jax.tree.map(lambda leaf: leaf + 0.1, lora))
    rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
    same_logits(QWEN3, rollout._sampler.models.base.params, actor)
    with pytest.raises(UserError, match="q_proj.w has a LoRA: lora_alpha must be given"):
        rollout_of(models, actor, RolloutConfig())


def scored(rollout, prompts, completions):
    """Return the log-probabilities of completions of several lengths, row by row."""
    padded = np.full((len(completions), 12), rollout.pad_id())
    for row, tokens in zip(padded, completions, strict=True):
        row[: len(tokens)] = tokens
    scores = rollout.get_per_token_logps(prompts, padded)
    return [row[: len(tokens)] for row, tokens in zip(scores, completions, strict=True)]


def same_rows(rows, others):
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(row, other, atol=1e-4)


def test_greedy_texts_and_log_probabilities_are_those_of_its_own_rollout(models):
    actor = actor_like("qwen3")
    # top_p makes its Sampler draw, whatever the temperature.
    config = RolloutConfig(
        max_tokens_to_generate=12,
        temperature=0.0,
        top_p=None,
        max_prompt_length=16,
        return_logprobs=True,
    )
    ours = rollout_of(models, actor, config)
    sizes = CacheConfig(64, QWEN3.num_layers, QWEN3.num_kv_heads, QWEN3.head_dim)
    theirs = VanillaRollout(actor, TokenizerAdapter(models.tokenizer), sizes)
    first, second = ours.generate(PROMPTS, config), theirs.generate(PROMPTS, config)

    prompts = first.left_padded_prompt_tokens
    np.testing.assert_array_equal(prompts, second.left_padded_prompt_tokens)
    assert first.text == second.text
    for tokens, stopped in zip(first.tokens, second.tokens, strict=True):
        assert tokens[: len(stopped)].tolist() == stopped.tolist()  # theirs has no EOS token
    scores = scored(ours, prompts, first.tokens)
    same_rows(scores, scored(theirs, prompts, first.tokens))
    same_rows(scores, first.logprobs)


def test_its_grpo_learns_from_our_rollouts(models):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = RolloutConfig(
        max_tokens_to_generate=12, temperature=0.8, max_prompt_length=16, return_logprobs=True
    )
    cluster = rl_cluster.RLCluster(
        actor=actor_like("qwen3", models.base.params),
        tokenizer=models.tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=functools.partial(TunixRollout, models=models, batch_size=4),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2),
                eval_every_n_steps=100,
                max_steps=40,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=config,
        ),
    )
    rewards = []

    def letters(prompts, completions, **_):
        """Reward texts of many different letters."""
        assert len(prompts) == len(completions) == 8 * len(PROMPTS)
        rewards.append([len(set(text)) / 12 for text in completions])
        return rewards[-1]

    # A second update with a batch asks for log-probabilities under the base that it is of.
    algorithm = GRPOConfig(num_generations=8, beta=0.0, num_iterations=2)
    learner = GRPOLearner(cluster, algorithm, letters)
    learner.train([{"prompts": np.array(PROMPTS)}] * 20)
    means = np.mean(rewards, axis=1)
    assert means[-5:].mean() > 1.2 * means[:5].mean()

    # The rollouts' base is the actor after its last update.
    actor, rollout = cluster.actor_trainer.model, cluster.rollout
    after = params_of(QWEN3, flattened(nnx.state(actor, nnx.Param)))
    assert_trees_equal(rollout._sampler.models.base.params, after)
    output = rollout.generate(PROMPTS, config)
    assert rollout.tau > 1
    same_rows(scored(rollout, output.left_padded_prompt_tokens, output.tokens), output.logprobs)


def test_another_rotation_is_refused(models):
    config = dataclasses.replace(models.base.config, rope=RopeConfig())
    base = dataclasses.replace(models.base, config=config)
    with pytest.raises(UserError, match="rope_theta 1000000 and no scaling"):
        rollout_of(dataclasses.replace(models, base=base), None, None)
