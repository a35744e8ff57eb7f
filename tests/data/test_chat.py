"""From records to tokens and loss masks, and from prompt rows to token ids: templates, mistakes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from clover_jax.data.chat import encode_prompt, encode_record, render_plain
from clover_jax.data.chat_templates import template_notice
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.records import Text, TokenRow, TokenTurns
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.data.conversations import conversation
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_fallback, save_byte_level

ASK = (("user", "the hat"), ("assistant", "he had it"), ("user", "the"), ("assistant", "be"))
# As ChatML: an end-of-turn marker, then a newline that the model does not write.
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("chat"), CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory):
    return load_tokenizer(save_byte_level(tmp_path_factory.mktemp("chatml"), CHATML))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    return load_tokenizer(save_byte_fallback(tmp_path_factory.mktemp("fallback")))


def masked_text(encoded, tokenizer):
    return tokenizer.decode(encoded.tokens[encoded.loss_mask])


def test_text_counts_whole_and_ends_with_eos(plain):
    encoded = encode_record(Text("f", "the hat"), plain, 300)
    assert encoded.loss_mask.all()
    assert encoded.tokens[-1] == plain.eos_token_id
    assert plain.decode(encoded.tokens[:-1]) == "the hat"


def test_a_section_in_the_middle_gets_no_special_tokens(plain):
    encoded = encode_record(Text("f", "the", starts=False, ends=False), plain, 300)
    assert not set(encoded.tokens.tolist()) & set(plain.all_special_ids)


def test_a_section_that_ends_in_an_eos_of_its_own_keeps_it(plain):
    encoded = encode_record(Text("f", "the</s>", starts=False, ends=False), plain, 300)
    assert plain.decode(encoded.tokens) == "the</s>"


def test_a_tokenizer_that_adds_eos_itself_gives_the_same_samples(plain, tmp_path):
    adding = load_tokenizer(save_byte_level(tmp_path))
    adding.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", adding.bos_token_id), ("</s>", adding.eos_token_id)],
    )
    sections = [
        Text("f", "the", starts, ends) for starts in (False, True) for ends in (False, True)
    ]
    for record in (*sections, conversation("f", ASK), conversation("f", ASK[:3])):
        ours, theirs = (encode_record(record, each, 300) for each in (adding, plain))
        # The tokenizer that adds no EOS adds no BOS either.
        begins = int(ours.tokens[0] == adding.bos_token_id)
        assert ours.tokens[begins:].tolist() == theirs.tokens.tolist()
        assert ours.loss_mask[begins:].tolist() == theirs.loss_mask.tolist()


def test_only_the_assistant_counts_in_a_chat_template(chat):
    encoded = encode_record(conversation("f", ASK), chat, 300)
    assert chat.decode(encoded.tokens) == (
        "<s>[user]the hat[assistant]he had it[user]the[assistant]be"
    )
    assert masked_text(encoded, chat) == "he had itbe"


@pytest.mark.parametrize("content", ["", " ", "\n"])
def test_an_empty_answer_counts_its_end_of_turn_only(chatml, content):
    messages = (("user", "a"), ("assistant", content), ("user", "b"), ("assistant", "be"))
    encoded = encode_record(conversation("f", messages), chatml, 300)
    assert masked_text(encoded, chatml) == content + "</s>be</s>"


# As Llama 2 and Mistral: the end of the question asks for the answer, and nothing is added.
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[{{ m['content'] }}]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
)
# As Qwen 3: the last answer gets a thinking block, those of the past have none.
THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' and loop.last %}<think></think>\n{% endif %}"
    "{{ m['content'] }}</s>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("content", ["", "s", "/"])
def test_an_answer_may_be_empty_or_a_part_of_the_end_of_turn_marker(tmp_path, content):
    messages = (("user", "a"), ("assistant", content), ("user", "b"), ("assistant", "be"))
    for template, last in ((INSTRUCT, "be"), (THINKING, "<think></think>\nbe")):
        tokenizer = load_tokenizer(save_byte_level(tmp_path, template))
        encoded = encode_record(conversation("f", messages), tokenizer, 300)
        assert masked_text(encoded, tokenizer) == f"{content}</s>{last}</s>"


@pytest.mark.parametrize("content", ["he had it", "final", "return"])
def test_past_answers_may_end_in_another_marker_than_the_last(tmp_path, content):
    # As gpt-oss, which answers in a channel that the generation prompt leaves to the model.
    template = (
        "{% for m in messages %}<{{ m['role'] }}>"
        "{% if m['role'] == 'assistant' %}<final>{{ m['content'] }}"
        "{% if loop.last %}<return>{% else %}<end>{% endif %}"
        "{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = load_tokenizer(save_byte_level(tmp_path, template))
    messages = (("user", "a"), ("assistant", content), ("user", "b"), ("assistant", "be"))
    encoded = encode_record(conversation("f", messages), tokenizer, 300)
    assert masked_text(encoded, tokenizer) == f"<final>{content}<final>be<return>"


def test_spaces_that_a_tokenizer_trims_from_offsets_count(tmp_path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path, CHATML))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    record = conversation("f", (("user", " a  b "), ("assistant", "a\n  b "), *ASK))
    encoded = encode_record(record, tokenizer, 300)
    assert masked_text(encoded, tokenizer) == "a\n  b </s>he had it</s>be</s>"


def test_without_a_template_messages_end_in_newlines_and_the_answer_counts(plain):
    encoded = encode_record(conversation("f", ASK), plain, 300)
    assert plain.decode(encoded.tokens) == "the hat\nhe had it\nthe\nbe\n</s>"
    assert masked_text(encoded, plain) == "he had it\nbe\n</s>"


def test_a_conversation_that_ends_with_the_user_has_no_eos_that_counts(plain):
    encoded = encode_record(conversation("f", ASK[:3]), plain, 300)
    assert masked_text(encoded, plain) == "he had it\n"


def test_render_plain_gives_the_docstrings_example():
    text, spans = render_plain(conversation("f", (("user", "a"), ("assistant", "b"))))
    assert text == "a\nb\n"
    assert spans == [(2, 4)]


@pytest.mark.parametrize("kind", ["plain", "chat"])
def test_what_precedes_an_answer_is_the_prompt_that_generate_reads(kind, request):
    tokenizer = request.getfixturevalue(kind)
    encoded = encode_record(conversation("f", ASK[:2]), tokenizer, 300)
    messages = [{"role": "user", "content": ASK[0][1]}]
    prompt = encode_prompt(parse_prompt({"messages": messages}, 0, "f"), tokenizer, 300)
    assert encoded.tokens[: encoded.loss_mask.argmax()].tolist() == prompt


def test_offsets_of_a_sentencepiece_tokenizer_are_understood(fallback):
    encoded = encode_record(conversation("f", ASK[:2]), fallback, 300)
    assert masked_text(encoded, fallback).split() == ["he", "had", "<unk>t</s>"] or (
        "he had" in masked_text(encoded, fallback)
    )
    assert "the hat" not in masked_text(encoded, fallback)


ROLES = st.sampled_from(["user", "assistant"])


@given(st.lists(st.tuples(ROLES, st.text("abhte ", min_size=1, max_size=9)), max_size=5))
def test_the_mask_never_covers_a_users_word(messages):
    marked = tuple(
        (role, text.upper() if role == "user" else text.lower()) for role, text in messages
    )
    text, spans = render_plain(conversation("f", marked))
    covered = "".join(text[start:end] for start, end in spans)
    assert covered == covered.lower()
    assert covered == "".join(text + "\n" for role, text in marked if role == "assistant")


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="token id 12 is outside the base's vocabulary, 0 to 9"):
        encode_record(TokenRow("f", (1,), (12,)), None, 10)
    # Numbers that no array of tokens can hold.
    for large in (2**31, 10**309):
        with pytest.raises(UserError, match=f"f: token id {large} is outside"):
            encode_record(TokenRow("f", (1,), (2, large)), None, 10)
        with pytest.raises(UserError, match=f"f: token id {large} is outside"):
            encode_record(TokenTurns("f", (((1,), (2,)), ((large,), (3,)))), None, 10)


def test_what_a_template_refuses_is_said(chat):
    record = conversation("f:3", (("system", "be nice"), *ASK))
    with pytest.raises(UserError, match="f:3: the base's chat template refuses.*no system role"):
        encode_record(record, chat, 300)


def test_answers_before_the_first_question_are_left_out(chat, plain):
    greeting = ("assistant", "hello")
    greeted, record = conversation("f", (greeting, greeting, *ASK)), conversation("f", ASK)
    ours, theirs = (encode_record(one, chat, 300) for one in (greeted, record))
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.loss_mask.tolist() == theirs.loss_mask.tolist()
    for messages in ((greeting,), ()):
        assert encode_record(conversation("f", messages), chat, 300).tokens.size == 0
    assert "hello" in masked_text(encode_record(greeted, plain, 300), plain)


def test_a_template_that_rewrites_the_past_is_refused(tmp_path):
    template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(save_byte_level(tmp_path, template))
    with pytest.raises(UserError, match="renders the conversation before answer 1 differently"):
        encode_record(conversation("f", ASK[:2]), tokenizer, 300)


def row(**values):
    return parse_prompt(values, index=0, source="p.jsonl:1")


def encoded_text(tokenizer, prompt, answers=()):
    return tokenizer.decode(encode_prompt(prompt, tokenizer, 300, answers))


def test_a_prompt_is_continued_as_it_is_even_by_a_chat_model(plain, chat):
    assert encoded_text(plain, row(prompt="the cat")) == "the cat"
    assert encoded_text(chat, row(prompt="the cat")) == "the cat"


def test_ids_of_tokens_need_no_tokenizer_and_text_does():
    encoded = encode_record(TokenRow("f", (5, 6), (7, 8, 9)), None, 10)
    assert encoded.tokens.tolist() == [5, 6, 7, 8, 9]
    assert encoded.loss_mask.tolist() == [False, False, True, True, True]
    assert encode_prompt(row(prompt_ids=[5, 1]), None, 300) == [5, 1]
    with pytest.raises(UserError, match="f:1: the base has no tokenizer files"):
        encode_record(Text("f:1", "hi"), None, 10)
    with pytest.raises(UserError, match="p.jsonl:1: the base has no tokenizer files; give prompt_"):
        encode_prompt(row(prompt="a"), None, 300)


def test_a_question_and_messages_go_through_the_template(chat):
    assert encoded_text(chat, row(question="Why?")) == "<s>[user]Why?[assistant]"
    prompt = row(
        messages=[
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    )
    assert encoded_text(chat, prompt) == "<s>[user]a[assistant]b[user]c[assistant]"


@pytest.fixture
def adding_bos(tmp_path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def test_a_text_that_begins_with_bos_gets_no_second_one(adding_bos):
    for text in ("<s>the hat</s>", "the hat</s>"):
        ids = encode_record(Text("f", text), adding_bos, 300).tokens
        assert adding_bos.decode(ids) == "<s>the hat</s>"
        assert encode_prompt(row(prompt=text), adding_bos, 300) == ids.tolist()
    asked = (("user", "<s>a"), ("assistant", "b"))
    encoded = encode_record(conversation("f", asked), adding_bos, 300)
    assert adding_bos.decode(encoded.tokens) == "<s>a\nb\n</s>"
    assert masked_text(encoded, adding_bos) == "b\n</s>"
    assert encoded_text(adding_bos, row(question="<s>a")) == "<s>a\n"


def test_texts_rendered_for_another_tokenizer_are_told_about(plain):
    rows = [Text("f", "<|begin_of_text|>the hat"), Text("f", "<s>the hat"), Text("f", "the hat")]
    notice = template_notice([*rows, row(prompt="<bos>the")], plain)
    assert notice.startswith("2 texts begin with a mark of another tokenizer, <|begin_of_text|> in")
    assert template_notice(rows[1:], plain) is None


def test_turns_are_played_with_the_answers_so_far(chat, plain):
    prompt = row(turns=["a", "c"])
    assert encoded_text(chat, prompt) == "<s>[user]a[assistant]"
    assert encoded_text(chat, prompt, ["b"]) == "<s>[user]a[assistant]b[user]c[assistant]"
    assert encoded_text(plain, prompt) == "a\n"
    assert encoded_text(plain, prompt, ["b"]) == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prompt": ""}, "p.jsonl:1: the prompt is empty; give at least one token"),
        ({"prompt_ids": [0, 300]}, "token id 300 is outside the base's vocabulary, 0 to 299"),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
            "p.jsonl:1: the base's chat template refuses the conversation: no system role",
        ),
    ],
)
def test_a_row_that_cannot_be_encoded_is_named(values, said, chat):
    with pytest.raises(UserError) as raised:
        encode_prompt(row(**values), chat, 300)
    assert said in str(raised.value)
