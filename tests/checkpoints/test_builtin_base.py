"""The base inside the package: whole, within its limits, and able to predict Python."""

import json
from pathlib import Path

import numpy as np
import transformers

import clover_jax
from clover_jax.checkpoints.loading import load_base
from experiments.tiny_base.bits_per_byte import score_documents

FOLDER = Path(clover_jax.__file__).parent / "assets" / "tiny"

# Written for this test, so that no corpus holds it.
UNSEEN = '''\
class Basket:
    """Fruit by kind, each kind with how many there are."""

    def __init__(self):
        self.counts = {}

    def add(self, kind, number=1):
        """Add some fruit of one kind."""
        if number < 0:
            raise ValueError("number must not be negative")
        self.counts[kind] = self.counts.get(kind, 0) + number

    def remove(self, kind):
        """Remove all fruit of one kind and return how many there were."""
        if kind not in self.counts:
            raise KeyError(kind)
        return self.counts.pop(kind)

    def __len__(self):
        return sum(self.counts.values())
'''


def test_weights_are_within_the_limits():
    sizes = [path.stat().st_size for path in FOLDER.glob("*.safetensors")]
    assert max(sizes) <= 15_000_000
    assert sum(sizes) <= 24_000_000


def test_predicts_python_it_has_not_seen():
    base = load_base("builtin:tiny")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(FOLDER))
    tokens = np.array(tokenizer(UNSEEN, add_special_tokens=False)["input_ids"])
    score = score_documents(
        base.config, base.params, [tokens], len(UNSEEN), bos=tokenizer.bos_token_id, length=256
    )
    assert score.bits_per_byte < 1.5


def test_prompts_are_varied_and_end_before_a_line_break():
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    prompts = [row["prompt"] for row in rows]
    assert len(prompts) == len(set(prompts)) == 200
    assert {row["category"] for row in rows} == {"function", "method", "test"}
    assert all(prompt.endswith((":", '"""', "'''")) for prompt in prompts)


def test_the_card_names_command_and_figures():
    card = (FOLDER / "README.md").read_text()
    assert "python -m experiments.tiny_base.pretrain" in card
    assert "| bits per byte, held-out modules |" in card
