"""The options of `serve`, checked before anything is loaded; nothing here imports JAX."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path

from clover_jax.decoding.row_settings import ADAPT
from clover_jax.decoding.sampling_config import DRAFT_SAMPLINGS
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.field_types import Setting, check_settings, setting
from clover_jax.serving.calls import FORMATS

KEY_VARIABLE = "CLOVER_JAX_API_KEY"
LARGEST_DEFAULT_LEN = 8192  # tokens of a request where --max_model_len says nothing

_listen = functools.partial(setting, group="listening")
_limit = functools.partial(setting, group="limits")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The flags of `serve` in addition to `ModelSpec`; seed: of requests without one."""

    spec: ModelSpec
    seed: int = 0
    host: str = _listen("127.0.0.1", "address to listen at; 0.0.0.0 is every one of this machine")
    port: int = _listen(8000, "port to listen at; 0 takes a free one", least=0, most=2**16 - 1)
    # Not shown by repr: keys belong in no log.
    api_key: tuple[str, ...] = dataclasses.field(
        default=(),
        repr=False,
        metadata={
            "setting": Setting(
                f"a key that clients must send; repeatable. Other users of this machine "
                f"see flags, so better --api_key_file or the variable {KEY_VARIABLE}",
                group="listening",
                repeated=True,
            )
        },
    )
    api_key_file: str | None = _listen(None, "file of keys that clients must send, one a line")
    allowed_origins: tuple[str, ...] = _listen(
        (), "web origins whose pages may call the server, such as https://example.org; * is all"
    )
    allowed_hosts: tuple[str, ...] = _listen(
        (), "Host names, as host.docker.internal, that a server without a key answers to as well"
    )
    served_model_name: str | None = _listen(None, "name of the model in the API [--base]")
    page: bool = _listen(True, "serve the page for the browser at /")

    draft_sampling: str = setting(
        "auto",
        "children by probability (topk), or drawn from the draft (sampled), which accepts more; "
        "auto draws for heads with weights and static trees without copies",
        group="sampling",
        choices=DRAFT_SAMPLINGS,
    )

    adapt: str | None = setting(None, ADAPT, group="draft")

    generation_config: str = setting(
        "auto",
        "sampling of requests that do not say: auto is what the base's generation_config.json "
        "says of temperature, top_k, top_p, min_p and repetition_penalty; none is temperature 1",
        group="sampling",
        choices=("auto", "none"),
    )

    tool_call_format: str = setting(
        "auto",
        "how the base writes calls of tools: auto is what its chat template tells; none leaves "
        "calls and thinking in the text",
        group="listening",
        choices=("auto", "none", *FORMATS),
    )

    batch_size: int = _limit(8, "requests decoded at once", least=1)
    max_model_len: int | None = _limit(
        None,
        f"tokens of a prompt and its answer [the base's context, at most {LARGEST_DEFAULT_LEN}]",
        least=3,
    )
    max_waiting: int = _limit(512, "requests that may wait for a slot; more get 429", least=1)
    request_timeout: float = _limit(600.0, "seconds that a request may take", least=1.0)
    max_body_bytes: int = _limit(2**20, "bytes of a request's body", least=1)
    max_connections: int = _limit(1024, "connections at once; more get 503", least=1)

    def __post_init__(self):
        check_settings(self)
        # Browsers send origins with a scheme, so a name without one would never match.
        for origin in self.allowed_origins:
            if origin != "*" and "://" not in origin:
                raise UserError(
                    f"--allowed_origins={origin}: an origin has a scheme, such as https://{origin}"
                )

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.spec.base

    def model_len(self, context: int) -> int:
        """Return how many tokens a prompt and its answer may have together.

        context: the base's. Raises UserError where more is asked for than the base has.
        """
        if self.max_model_len is None:
            return min(context, LARGEST_DEFAULT_LEN)
        if self.max_model_len > context:
            raise UserError(
                f"--max_model_len={self.max_model_len}: the base's context is {context} tokens; "
                "give that or less"
            )
        return self.max_model_len

    def api_keys(self) -> tuple[str, ...]:
        """Return all keys that a client may send; none where no key is needed.

        Raises UserError for an empty key, and a file that is missing or holds none.
        """
        keys = list(self.api_key)
        # A variable that is set to nothing is a mistake that would leave the door open.
        if KEY_VARIABLE in os.environ:
            keys.append(os.environ[KEY_VARIABLE])
        if self.api_key_file is not None:
            lines = Path(self.api_key_file).expanduser().read_text(encoding="utf-8").splitlines()
            listed = [line.strip() for line in lines if line.strip()]
            if not listed:
                raise UserError(f"--api_key_file={self.api_key_file} holds no key")
            keys += listed

        # A header can hold no other characters, and blanks at its ends are stripped on the way.
        for key in keys:
            if not (key.isascii() and key.isprintable() and key.strip() == key != ""):
                raise UserError(
                    "an API key must be printable ASCII without blanks around it, at least one "
                    "character; it is not shown here"
                )
        return tuple(keys)
