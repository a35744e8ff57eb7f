"""Serve OpenAI's API over HTTP: completions and chat, streamed or whole, for many clients at once.

Requests share one engine and join it while others decode. Without flags it serves the package's
small model, without speculative decoding. It listens at once, answers 503 until the model is
loaded, and compiles its programs while it serves. SIGTERM and Ctrl-C finish the running requests
and stop it. Several processes serve as one if the environment says so (launch/local_processes); the
first one listens.
"""

import importlib.util
import sys

from clover_jax import cli
from clover_jax.cli.command_flags import define_settings, settings_from
from clover_jax.decoding.spec import ModelSpec
from clover_jax.errors import UserError
from clover_jax.runtime.progress import say
from clover_jax.serving.options import ServeOptions

# Names of modules, as they are imported.
_PACKAGES = ("starlette", "uvicorn", "pydantic", "prometheus_client")


def define_flags(flags):
    """Define this command's flags."""
    for kind in (ModelSpec, ServeOptions):
        define_settings(flags, kind)
    cli.define_common_flags(flags, "workdir")


def main(flags) -> None:
    """Run the command."""
    # All missing packages at once; an import would name only the first.
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"serve needs {', '.join(missing)}; run pip install 'clover-jax[serve]', or in a "
            "checkout pip install -e '.[serve]'"
        )
    spec = settings_from(flags, ModelSpec)
    options = settings_from(flags, ServeOptions, spec=spec, seed=flags.seed)
    say("starting JAX")  # these imports take seconds
    from clover_jax.runtime.distributed import joined_processes, primary_speaks
    from clover_jax.serving.run import run

    with joined_processes(), primary_speaks():
        cli.report(run(options))


if __name__ == "__main__":
    sys.exit(cli.run(main, define_flags))
