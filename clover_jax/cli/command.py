"""The wrapper around every command: flags in, one JSON line out, mistakes in one line.

A command module holds its docstring (which is its `--help`), `define_flags`, `main`, and at its end

    if __name__ == "__main__":
        sys.exit(cli.run(main, define_flags))

Imports of JAX stay inside `main`, so that `--help` and a mistyped flag answer at once.
"""

import contextlib
import errno
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from clover_jax import __version__
from clover_jax.cli import command_flags
from clover_jax.cli.command_flags import help_text
from clover_jax.errors import UserError
from clover_jax.runtime.files import naming
from clover_jax.runtime.jsonl import to_json

STATUS_OK = 0
STATUS_SOME_FAILED = 1  # some rows failed, the others are written
STATUS_USER_ERROR = 2
# The numbers that shells report for a process ended by a signal.
STATUS_INTERRUPTED = 128 + signal.SIGINT
STATUS_BROKEN_PIPE = 128 + signal.SIGPIPE

# With the names of absl's own programs.
HELP = {"--help", "-help", "-h", "--helpfull", "--helpshort", "--help=all"}

# Errors of the file system for a path of the user, with advice.
_PATH_ADVICE = {
    errno.ENOENT: "give a path that exists",
    errno.EACCES: "give a path that this user may use",
    errno.EPERM: "give a path that this user may use",
    errno.ENOTDIR: "give a path whose parents are folders",
    errno.EISDIR: "give a file, not a folder",
    errno.EEXIST: "give a path that is free",
    errno.EROFS: "give a path on a writable file system",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ENOSPC: "free some space or give a path on another disk",
    errno.EFBIG: "give a path on a file system, or a limit, that allows larger files",
    errno.EDQUOT: "free some of your quota or give a path on another disk",
}


def run(
    main: Callable[[absl_flags.FlagValues], int | None],
    define_flags: Callable[[absl_flags.FlagValues], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Run a command and return its exit status.

    main: takes the parsed flags, prints its result with `report`, returns a status (None is 0).
    define_flags: defines the command's flags, common ones included.
    argv: the arguments without the program's name; by default the ones of this process.
    The status is main's own; 0 for `--help` and `--version`; 2 with one line on stderr for a user's
    mistake (`UserError`, a bad flag, a path that cannot be used); 130 when interrupted. Any other
    exception is a bug and keeps its traceback.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # A module that runs as a script is called __main__; its spec has the real name.
    module = sys.modules[main.__module__]
    spec = getattr(module, "__spec__", None)
    command = spec.name if spec else Path(getattr(module, "__file__", None) or main.__module__).stem
    try:
        # After "--" nothing is a flag.
        asked = set(argv[: argv.index("--")] if "--" in argv else argv)
        if "--version" in asked:
            print(f"clover-jax {__version__}")
            return STATUS_OK
        if HELP & asked:
            flags, everything = command_flags.defined(define_flags), "--help=all" in asked
            print(help_text(command, module.__doc__ or "", flags, everything))
            return STATUS_OK
        flags = command_flags.parse_flags(define_flags, argv)
        for name in flags:
            if flags[name].present and flags[name].help == command_flags.IDLE:
                _say(command, f"--{name} has no effect here")
        use_compilation_cache()
        status = main(flags)
        # A full disk behind stdout is found here.
        with naming("standard output"):
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout has ended (`| head`). Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS_BROKEN_PIPE
    except KeyboardInterrupt:
        _say(command, "interrupted")
        return STATUS_INTERRUPTED
    except Exception as error:
        # A Ctrl-C during an import becomes an ImportError.
        if isinstance(error.__context__, KeyboardInterrupt):
            _say(command, "interrupted")
            return STATUS_INTERRUPTED
        mistake = _describe_mistake(error)
        if mistake is None:
            error.add_note(f"{command}: this is a bug, not a mistake of yours.")
            raise
        _say(command, mistake)
        return STATUS_USER_ERROR
    return STATUS_OK if status is None else status


def use_compilation_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let JAX keep compiled programs under the user's cache folder, unless it has a folder set.

    JAX reads these variables when it is imported.
    A folder a host: programs for a CPU use the instructions that it has. Where JAX was given a
    folder, nothing is changed; JAX_ENABLE_COMPILATION_CACHE=false turns the cache off.
    """
    if "JAX_COMPILATION_CACHE_DIR" in environment:
        return
    # Of each user, where the system keeps what may be deleted.
    root = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "clover_jax", "programs", platform.node() or "host")
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # Small programs too, since a command compiles hundreds of them; the oldest go beyond 2 GB.
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(2 * 1024**3))


def report(result: dict[str, Any]) -> None:
    """Print `result` as one line of JSON, the last on stdout; infinity and NaN become null."""
    with naming("standard output"):
        print(to_json(result), flush=True)


@contextlib.contextmanager
def stop_signals_as_event() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that a loop can save and stop.

    A second Ctrl-C interrupts at once. A signal that is ignored stays ignored.
    """
    requested = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number, frame):
        requested.set()
        if number == signal.SIGINT:
            signal.signal(number, before[number])
            # Not through sys.stderr, which may be writing another line.
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(command: str, message: str) -> None:
    # One line, however a library folds its messages.
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _describe_mistake(error: Exception) -> str | None:
    """Return the message for a user's mistake, and None for a bug."""
    if isinstance(error, absl_flags.Error):
        return f"{str(error).rstrip(' .')}; see --help"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _PATH_ADVICE:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}; {_PATH_ADVICE[error.errno]}"
    return None
