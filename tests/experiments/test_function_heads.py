"""Prompts are the heads of functions, whole and in their own words."""

from clover_jax.data.corpus import Document, builtin_documents
from experiments.tiny_base.function_heads import heldout_prompts

MODULE = '''\
import os


@decorated
def join(
    first, second,
):
    # The body starts with a comment.
    path = os.path.join(first, second)
    if not path:
        raise ValueError
    return path


def short(x):
    return x


class Shape(Base):
    """A shape."""

    colour = 1

    async def area(self, scale: float) -> float:
        """Return the area.

        In square metres.
        """
        total = 0
        for side in self.sides:
            total += side
        return total * scale
'''


def prompts_of(documents, count=100):
    return {row["prompt"]: row["category"] for row in heldout_prompts(documents, count)}


def test_takes_heads_up_to_colon_or_docstring():
    assert prompts_of([Document("shapes.py", MODULE)]) == {
        "def join(\n    first, second,\n):": "function",
        "class Shape(Base):\n\n    async def area(self, scale: float) -> float:\n"
        '        """Return the area.\n\n        In square metres.\n        """': "method",
    }


def test_modules_take_turns():
    documents = [Document(f"{name}.py", MODULE.replace("join", name)) for name in ("a", "b")]
    first, second = heldout_prompts(documents, 2)
    assert first != second
    assert len(heldout_prompts(documents, 3)) == 3


def test_test_modules_have_their_own_category():
    rows = heldout_prompts([Document("test/test_shapes.py", MODULE)], 10)
    assert {row["category"] for row in rows} == {"test"}


def test_every_prompt_of_the_library_is_text_of_a_held_out_module():
    documents = builtin_documents("heldout")
    texts = [document.text for document in documents]
    rows = heldout_prompts(documents, 50)
    assert len(rows) == 50
    for row in rows:
        head = row["prompt"].split("\n\n", 1)[-1] if row["prompt"][:5] == "class" else row["prompt"]
        assert any(head in text for text in texts)
        assert row["prompt"].endswith((":", '"""', "'''"))
