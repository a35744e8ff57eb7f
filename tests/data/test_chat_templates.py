"""Chat templates: none, one that renders as transformers does, and ones that break the limits."""

import datetime
import json
import signal
import subprocess
import sys
import time

import pytest

from clover_jax import cli, prepare
from clover_jax.data import chat_templates
from clover_jax.data.chat_templates import (
    RowTemplate,
    clock_identity,
    frozen_clock,
    template_notice,
    with_chat_template,
)
from clover_jax.data.prompts import parse_prompt
from clover_jax.data.tokenizer import load_tokenizer
from clover_jax.errors import UserError
from clover_jax.training.settings import TrainSettings
from clover_jax.training.setup import load_inputs
from tests.conftest import REPOSITORY, WARNINGS
from tests.tiny_folders import save_tiny_base
from tests.tiny_tokenizers import save_byte_level

NOTICE = "the model has no chat template: messages of 2 conversations are joined with"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def data(tmp_path):
    rows = [{"prompt": "a", "response": "b c"}] * 2 + [{"text": "the hat"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("template", [None, "vicuna"])
def test_train_says_that_nothing_marks_who_speaks(base, data, capsys, template):
    load_inputs(TrainSettings(base=str(base), data=str(data), seq_len=32, chat_template=template))
    assert (NOTICE in capsys.readouterr().err) == (template is None)


def test_prepare_says_it_too(base, data, capsys):
    flags = [f"--base={base}", f"--data={data}", "--seq_len=32", "--preview"]
    assert cli.run(prepare.main, prepare.define_flags, flags) == 0
    assert NOTICE in capsys.readouterr().err


def test_only_conversations_without_a_template_are_told_about(tmp_path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    forms = [{"prompt": "a"}, {"turns": ["a", "b"]}, {"question": "c"}]
    prompts = [parse_prompt(row, 0, "f") for row in forms]
    assert NOTICE in template_notice(prompts, tokenizer)
    assert template_notice(prompts[:1], tokenizer) is None
    assert template_notice(prompts, None) is None
    assert template_notice(prompts, with_chat_template(tokenizer, "vicuna")) is None


QUESTION = [{"role": "user", "content": "caf\u00e9 <b> \U0001f600"}]
TRICKS = (
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}{{ m | tojson }}"
    "{% generation %}{{ namespace(a=1).a }}{% endgeneration %}\n{% if m.role == 'x' %}{% break %}"
    "{% endif %}{% endfor %}{{ add_generation_prompt }}{{ tools is none }}"
)


@pytest.mark.parametrize("template", ["vicuna", "baichuan2", TRICKS], ids=lambda text: text[:9])
def test_a_template_renders_as_in_transformers(tmp_path, template):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    if template == TRICKS:
        tokenizer.chat_template = template
    with_chat_template(tokenizer, None if template == TRICKS else template)
    for ask in (True, False):
        theirs = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=ask)
        assert RowTemplate(tokenizer, "f").render(QUESTION, ask) == theirs


def test_of_several_templates_the_default_is_used(tmp_path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.chat_template = {"tool_use": "no", "default": "yes"}
    assert RowTemplate(with_chat_template(tokenizer, None), "f").render(QUESTION, True) == "yes"


ENDLESS = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
LARGE = "takes more than 512 MB|MemoryError"


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ 'A' * 10000000000 }}", LARGE),
        ("{{ '%10000000000d' % 1 }}", LARGE),
        ("{{ 'A' * 9000000 }}", "it makes a text of 9000000 characters"),
        ("{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
         "{% endfor %}", LARGE),
        ("{% include 'x' %}", "no loader for this environment"),
        ("{% for %}", "Expected an expression"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (ENDLESS, "takes more than 3 s of processor time"),
        (5, "must be a text, or several with one named default, not 5"),
        ({"tool_use": "a"}, 'not {"tool_use": "a"}'),
    ],
    ids=str,
)  # fmt: skip
def test_a_template_that_breaks_the_limits_is_refused_when_it_is_loaded(
    tmp_path, template, message
):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message) as raised:
        with_chat_template(tokenizer, None)
    assert len(str(raised.value).splitlines()) == 1
    assert str(raised.value).startswith("--base: the base's chat template")


def test_a_row_that_breaks_the_limits_fails_alone(tmp_path):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.chat_template = "{{ 'A' * (messages[0]['content'] | int(0)) }}"
    with_chat_template(tokenizer, None)
    for size, expected in (("3", "AAA"), ("99999999999", None), ("2", "AA")):
        ask = [{"role": "user", "content": size}]
        if expected is None:
            with pytest.raises(UserError, match="f:2: the base's chat template takes more than"):
                RowTemplate(tokenizer, "f:2").render(ask, True)
        else:
            assert RowTemplate(tokenizer, "f").render(ask, True) == expected


def test_a_template_without_end_is_left_by_an_interrupt(tmp_path):
    save_byte_level(tmp_path)
    (tmp_path / "endless.jinja").write_text(ENDLESS)
    source = (
        # A job in the background of a script ignores interrupts, and its children with it.
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from clover_jax.data.chat_templates import with_chat_template\n"
        "from clover_jax.data.tokenizer import load_tokenizer\n"
        "tokenizer = with_chat_template(load_tokenizer(sys.argv[1]), 'vicuna')\n"
        "print('begins', flush=True)\n"
        "with_chat_template(tokenizer, sys.argv[1] + '/endless.jinja')\n"
    )
    process = subprocess.Popen(
        [sys.executable, *WARNINGS, "-c", source, str(tmp_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"begins\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    # The limit of its time would have ended it too, but with a line that names the template.
    assert error.strip().endswith(b"KeyboardInterrupt")


DATED = (
    "{{ strftime_now('%Y-%m-%d %H') }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def yesterday(monkeypatch):
    """Let runs begin yesterday, until it is undone."""
    day = datetime.datetime.now() - datetime.timedelta(days=1)

    class Yesterday(datetime.datetime):
        @classmethod
        def now(cls):
            return day

    monkeypatch.setattr(chat_templates.datetime, "datetime", Yesterday)
    return day.strftime("%Y-%m-%d %H")


def test_a_template_reads_one_time_in_a_run_and_in_what_follows_it(
    tmp_path, yesterday, monkeypatch
):
    tokenizer = load_tokenizer(save_byte_level(tmp_path))
    tokenizer.chat_template = DATED
    record = tmp_path / "record.json"
    with frozen_clock(record):
        text = RowTemplate(tokenizer, "f").render(QUESTION, True)
        record.write_text(json.dumps({"identity": clock_identity(tokenizer)}))
    assert text.startswith(yesterday)
    monkeypatch.undo()
    with frozen_clock(tmp_path / "missing.json", record):
        assert RowTemplate(tokenizer, "f").render(QUESTION, True) == text
    # Without a run, as in the server, it is the clock's.
    assert not RowTemplate(tokenizer, "f").render(QUESTION, True).startswith(yesterday)
    with frozen_clock():
        assert not RowTemplate(tokenizer, "f").render(QUESTION, True).startswith(yesterday)
        tokenizer.chat_template = "{{ messages }}"
        assert clock_identity(tokenizer) == {}


def test_runs_that_go_on_the_next_day_have_the_same_samples(
    tmp_path_factory, data, tmp_path, yesterday, monkeypatch, capsys
):
    base = save_tiny_base(tmp_path_factory.mktemp("dated") / "base", template=DATED)
    out = tmp_path / "out"
    flags = [f"--base={base}", f"--data={data}", "--seq_len=64", f"--output={out}"]
    assert cli.run(prepare.main, prepare.define_flags, flags) == 0
    first = json.loads((out / "train.json").read_text())
    assert first["made_from"]["template_time"].startswith(yesterday.split()[0])
    monkeypatch.undo()
    assert cli.run(prepare.main, prepare.define_flags, flags) == 0
    assert json.loads((out / "train.json").read_text()) == first
    # Made again, it has today's.
    assert cli.run(prepare.main, prepare.define_flags, [*flags, "--overwrite"]) == 0
    again = json.loads((out / "train.json").read_text())
    assert again["made_from"]["template_time"] > first["made_from"]["template_time"]
