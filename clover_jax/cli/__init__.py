"""The wrapper of every command, and the flags that all commands share."""

from clover_jax.cli.command import HELP as HELP
from clover_jax.cli.command import STATUS_INTERRUPTED as STATUS_INTERRUPTED
from clover_jax.cli.command import STATUS_OK as STATUS_OK
from clover_jax.cli.command import STATUS_SOME_FAILED as STATUS_SOME_FAILED
from clover_jax.cli.command import STATUS_USER_ERROR as STATUS_USER_ERROR
from clover_jax.cli.command import report as report
from clover_jax.cli.command import run as run
from clover_jax.cli.command import stop_signals_as_event as stop_signals_as_event
from clover_jax.cli.command_flags import define_common_flags as define_common_flags
from clover_jax.cli.command_flags import flag_settings as flag_settings
from clover_jax.cli.command_flags import workdir_of as workdir_of
