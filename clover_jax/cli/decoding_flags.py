"""The flags of every command that decodes, defined once, and the settings they make.

Imports of the library stay inside functions: `--help` answers without it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from absl import flags as absl_flags

from clover_jax.cli.command_flags import define_template_flag, group_flags

if TYPE_CHECKING:
    from clover_jax.generation.settings import GenerationSettings
    from clover_jax.loading.models import ModelSpec


def define_decoding_flags(flags: absl_flags.FlagValues) -> None:
    """Define how rows are decoded: limits, sampling, verification, what a draft may be."""

    def define(kind, name, default, help_text, **limits):
        getattr(absl_flags, f"DEFINE_{kind}")(name, default, help_text, flag_values=flags, **limits)

    def choose(name, default, choices, help_text):
        absl_flags.DEFINE_enum(name, default, choices, help_text, flag_values=flags)

    define("float", "draft_rope_theta", None, "rotary base for a layout that does not say it")
    define(
        "bool",
        "allow_base_mismatch",
        False,
        "use a draft that was trained for another base or chat template",
    )
    define_template_flag(flags)
    define_int8_flag(flags)
    define("integer", "max_new_tokens", 128, "tokens to emit at most, a turn", lower_bound=1)
    define_sampling_flags(flags)
    choose(
        "verify",
        None,
        ["greedy", "lossless", "typical"],
        "how drafted tokens are accepted [greedy at temperature 0, else lossless]: lossless text "
        "has the distribution of plain sampling; typical is Medusa's rule and is not lossless",
    )
    choose(
        "draft_sampling",
        "topk",
        ["topk", "sampled"],
        "children by probability, or drawn from the draft (static trees)",
    )
    define("multi_string", "stop", [], "end the text before this; may be given again")
    define("bool", "ignore_eos", False, "go on after an end-of-sequence token")
    choose(
        "context_overflow",
        "error",
        ["error", "truncate_left", "skip"],
        "what becomes of a prompt that is longer than the base's context",
    )

    group_flags(flags, "draft", "draft", "drafts", "tree", "calibration", "int8")
    group_flags(flags, "drafts of others", "draft_rope_theta", "allow_base_mismatch")
    group_flags(flags, "sampling", *_SAMPLING, "verify", "draft_sampling")
    group_flags(flags, "text", "max_new_tokens", "stop", "ignore_eos", "context_overflow")


_SAMPLING = ("temperature", "top_k", "top_p")


def define_int8_flag(flags: absl_flags.FlagValues) -> None:
    """Define whose matrices are rounded."""
    absl_flags.DEFINE_list(
        "int8",
        [],
        "whose matrices to round to 8 bits: draft, which leaves the text as it is, or base,draft",
        flag_values=flags,
    )


def define_sampling_flags(flags: absl_flags.FlagValues) -> None:
    """Define how the base's distribution is warped."""
    number, whole = absl_flags.DEFINE_float, absl_flags.DEFINE_integer
    greedy = "0 takes the most probable token"
    number("temperature", 0.0, greedy, lower_bound=0.0, flag_values=flags)
    kept = "draw from this many tokens at most; 0: from all"
    whole("top_k", 0, kept, lower_bound=0, flag_values=flags)
    mass = "draw from the most probable tokens up to this mass"
    number("top_p", 1.0, mass, lower_bound=0.0, upper_bound=1.0, flag_values=flags)


def generation_settings(flags: absl_flags.FlagValues) -> GenerationSettings:
    """Return the settings that the flags of `define_decoding_flags` ask for."""
    from clover_jax.generation.settings import GenerationSettings

    return GenerationSettings(
        max_new_tokens=flags.max_new_tokens,
        ignore_eos=flags.ignore_eos,
        context_overflow=flags.context_overflow,
        verify=flags.verify,
        draft_sampling=flags.draft_sampling,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        stop=tuple(flags.stop),
    )


def model_spec(flags: absl_flags.FlagValues, **instead: Any) -> ModelSpec:
    """Return what a command's flags name to decode with.

    instead: values that replace those of the flags. A flag that the command lacks has its default.
    """
    from clover_jax.loading.models import ModelSpec

    names = [field.name for field in dataclasses.fields(ModelSpec) if field.name in flags]
    given: dict[str, Any] = {name: flags[name].value for name in names}
    return ModelSpec(**given | instead)
