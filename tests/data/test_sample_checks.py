import pytest

from clover_jax.data.chat import encode_record
from clover_jax.data.chat_templates import with_chat_template
from clover_jax.data.records import TokenRow
from clover_jax.data.samples import Reading, RecordSamples, look_at
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from tests.data.conversations import conversation
from tests.tiny_checkpoints import edit_json
from tests.tiny_tokenizers import CHAT_TEMPLATE, save_byte_level

ASK = (("user", "the hat"), ("assistant", "he had it"), ("user", "the"), ("assistant", "be"))


def tokenizer_with(folder, template):
    return load_tokenizer(save_byte_level(folder, template))


def masked_text(encoded, tokenizer):
    return tokenizer.decode(encoded.tokens[encoded.loss_mask])


def rows(*sizes):
    return [TokenRow("f", (1,), tuple(range(2, size + 1))) for size in sizes]


def look(records, seq_len=8, max_cut=0.05):
    samples = RecordSamples(records, Reading(None, 100, seq_len))
    counts = look_at(samples)
    counts.check(samples, max_cut)
    return counts


def test_samples_are_counted():
    counts = look(rows(8, 5))
    assert (counts.tokens, counts.counted, counts.longest, counts.cut) == (13, 11, 8, 0)


def test_data_without_a_token_to_learn_are_refused():
    records = [conversation("f", (("user", "hi"),))] * 3
    samples = RecordSamples([TokenRow("f", (1, 2), ())] * len(records), Reading(None, 10, 8))
    with pytest.raises(UserError, match="none of the 6 tokens in 3 samples is an assistant's"):
        look_at(samples).check(samples)


def test_all_data_are_looked_at_before_they_are_called_useless():
    records = [TokenRow("f", (1, 2), ())] * 199 + [TokenRow("f", (1,), (2, 3))]
    counts = look_at(RecordSamples(records, Reading(None, 10, 8)), count=4)
    assert (counts.counted, counts.pieces) == (2, 1)


def test_data_that_count_no_token_but_the_last_of_a_row_are_refused():
    with pytest.raises(UserError, match="no answer of the 3 samples has two tokens"):
        look([TokenRow("f", (1, 2), (3,))] * 3)
    assert look([TokenRow("f", tuple(range(9)), (9, 10))], max_cut=1).pieces == 1


def test_a_greeting_without_a_question_is_no_lost_answer(tmp_path):
    tokenizer = tokenizer_with(tmp_path, CHAT_TEMPLATE)
    records = [conversation("f", (("assistant", "hello"),)), conversation("f", ASK)]
    samples = RecordSamples(records, Reading(tokenizer, 300, 64))
    (line,) = look_at(samples).warnings(samples)
    assert line == "1 of 2 samples have no answer to learn from and are left out"


def test_too_many_long_conversations_are_refused_with_the_longest_named():
    message = r"2 of 4 conversations \(50 %\) are longer than --seq_len=8 .*longest has 30 tokens"
    with pytest.raises(UserError, match=message):
        look(rows(8, 9, 30, 4))
    assert look(rows(8, 9, 30, 4), max_cut=0.5).cut == 2


def test_a_template_that_leaves_the_answer_out_is_refused(tmp_path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
        "{% endfor %}"
    )
    tokenizer = tokenizer_with(tmp_path, template)
    samples = RecordSamples([conversation("f", ASK)], Reading(tokenizer, 300, 64))
    with pytest.raises(UserError, match="all zero although the assistant says something"):
        look_at(samples).check(samples)


def test_a_template_without_assistant_markers_is_refused(tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, template)
    with pytest.raises(UserError, match=r"no assistant marker: it puts '\[assistant\]' before"):
        encode_record(conversation("f", ASK), tokenizer, 300)


# As Qwen3 and others: what an answer of the past thought is dropped.
DROPPING = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].strip() }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As DeepSeek-R1: a question for an answer begins the thinking, which the past lacks.
BEGINNING = DROPPING.replace("<assistant>{%", "<assistant><think>{%")
THOUGHT = (("user", "a"), ("assistant", "<think>b</think>the"), ("user", "c"))
THOUGHT = (*THOUGHT, ("assistant", "<think>d</think>hat"))


def test_thinking_in_the_content_that_the_past_loses_is_understood(tmp_path):
    tokenizer = tokenizer_with(tmp_path, DROPPING)
    encoded = encode_record(conversation("f", THOUGHT), tokenizer, 300)
    assert masked_text(encoded, tokenizer) == "the</s><think>d</think>hat</s>"


def test_a_conversation_that_a_template_rewrites_is_left_out_and_counted(tmp_path, capsys):
    tokenizer = tokenizer_with(tmp_path, BEGINNING)
    one_turn = conversation("f:1", (THOUGHT[0], THOUGHT[1]))
    records = [one_turn] * 40 + [conversation("f:41", THOUGHT)]
    samples = RecordSamples(records, Reading(tokenizer, 300, 64))
    counts = look_at(samples)
    counts.check(samples)
    assert (counts.refused, counts.samples) == (1, 41)
    assert samples[40].tokens.size == 0
    error = capsys.readouterr().err
    assert error.startswith("left out a sample: f:41: the base's chat template renders an answer")
    assert len(error.splitlines()) == 1


def test_data_that_a_template_mostly_rewrites_are_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path, BEGINNING)
    samples = RecordSamples([conversation("f", THOUGHT)] * 3, Reading(tokenizer, 300, 64))
    with pytest.raises(UserError, match="3 of 3 samples cannot be used, the first since f: the"):
        look_at(samples).check(samples)


def test_a_count_of_some_samples_says_so():
    samples = RecordSamples(rows(*[9] * 200), Reading(None, 100, 8))
    counts = look_at(samples)
    (line,) = counts.warnings(samples)
    assert line.startswith("67 of 200 samples were looked at: 67 of 67 conversations are longer")
    with pytest.raises(UserError, match="67 of 200 samples were looked at: 67 of 67 conv"):
        counts.check(samples, 0.05)


@pytest.mark.parametrize("eos, is_said", [((99,), True), ((7,), False), ((), False)])
def test_answers_without_an_end_are_said(eos, is_said):
    samples = RecordSamples(rows(7, 6), Reading(None, 100, 8, eos_token_ids=eos))
    lines = look_at(samples).warnings(samples)
    expected = "no answer in 2 conversations ends in an end-of-sequence token (99)"
    assert [line.startswith(expected) for line in lines] == [True] * is_said


@pytest.mark.parametrize("name", ["vicuna", "baichuan2"])
def test_shipped_templates_count_the_answers_and_their_eos(tmp_path, name):
    tokenizer = with_chat_template(tokenizer_with(tmp_path, None), name)
    encoded = encode_record(conversation("f", ASK), tokenizer, 300)
    assert masked_text(encoded, tokenizer).replace(" ", "") == "hehadit</s>be</s>"


def test_the_vicuna_template_renders_as_the_model_was_tuned(tmp_path):
    tokenizer = with_chat_template(tokenizer_with(tmp_path, None), "vicuna")
    messages = [{"role": role, "content": content} for role, content in ASK[:3]]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<s>A chat between a curious user and an artificial intelligence")
    assert text.endswith("USER: the hat ASSISTANT: he had it</s> USER: the ASSISTANT:")


def test_a_template_file_is_read_and_a_missing_one_refused(tmp_path, capsys):
    tokenizer = tokenizer_with(tmp_path, None)
    path = tmp_path / "mine.jinja"
    path.write_text(CHAT_TEMPLATE + "\n")
    assert with_chat_template(tokenizer, str(path)).chat_template == CHAT_TEMPLATE
    # Of two in the folder, transformers reads the file.
    edit_json(tmp_path / "tokenizer_config.json", chat_template="a")
    (tmp_path / "chat_template.jinja").write_text("b")
    assert with_chat_template(load_tokenizer(tmp_path), None).chat_template == "b"
    assert "has another chat_template than chat_template.jinja" in capsys.readouterr().err
    with pytest.raises(UserError, match="no such file, and none of baichuan2, vicuna"):
        with_chat_template(tokenizer, "alpaca")
    with pytest.raises(UserError, match="no tokenizer files"):
        with_chat_template(None, "vicuna")
