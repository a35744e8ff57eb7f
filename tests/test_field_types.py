"""Settings that are declared once: what a caller may give, and the flags that are made of them."""

import dataclasses
import math

import pytest
from absl import flags as absl_flags

from clover_jax.cli.command_flags import define_settings, help_text, parse_flags, settings_from
from clover_jax.errors import UserError
from clover_jax.field_types import check_settings, setting


@dataclasses.dataclass(frozen=True)
class Settings:
    """One setting of each type."""

    rows: int = setting(4, "rows at once", group="data", least=1, most=9)
    rate: float | None = setting(None, "how fast [the method's]", group="data")
    rule: str = setting("greedy", "how to accept", choices=("greedy", "typical"))
    is_strict: bool = setting(False, "end at the first fault")
    stop: tuple[str, ...] = setting((), "end the text before this", repeated=True)
    parts: tuple[str, ...] = setting((), "which parts")
    made_by: str = "a program"  # no flag

    def __post_init__(self):
        check_settings(self)


def define(flags):
    define_settings(flags, Settings)


def test_flags_are_made_of_the_fields_and_read_back():
    assert settings_from(parse_flags(define, []), Settings) == Settings()
    argv = ["--rows=2", "--rate=0.5", "--rule=typical", "--is_strict", "--stop=a,b", "--stop=c"]
    wanted = Settings(2, 0.5, "typical", True, ("a,b", "c"), ("d", "e"), "me")
    flags = parse_flags(define, [*argv, "--parts=d,e"])
    assert settings_from(flags, Settings, made_by="me") == wanted


@pytest.mark.parametrize("flag", ["--rows=0", "--rows=10", "--rule=lucky", "--made_by=x"])
def test_a_flag_is_held_to_what_its_field_declares(flag):
    with pytest.raises(absl_flags.Error):
        parse_flags(define, [flag])


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rows": 0}, r"rows \(0\) must be at least 1"),
        ({"rows": 10}, r"rows \(10\) must be at most 9"),
        ({"rate": math.nan}, r"rate \(nan\) must be at least 0"),
        ({"rate": math.inf}, r"rate \(inf\) must be .* finite"),
        ({"rule": "lucky"}, "rule 'lucky' is not one of greedy, typical"),
        ({"rows": "4"}, "rows must be a whole number, not '4'"),
        ({"is_strict": 1}, "is_strict must be True or False, not 1"),
    ],
    ids=str,
)
def test_a_caller_is_held_to_the_same(values, message):
    with pytest.raises(UserError, match=message):
        Settings(**values)


def test_help_lists_flags_by_group_and_one_that_two_dataclasses_share_once():
    flags = absl_flags.FlagValues()
    define_settings(flags, Settings)
    define_settings(flags, Settings)
    assert flags["rows"].default == 4
    shown = help_text("command", "What it does.", flags)
    assert shown.index("data:") < shown.index("--rate=X") < shown.index("flags:")
    assert shown.index("flags:") < shown.index("--rule=greedy|typical")
