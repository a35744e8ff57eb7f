"""The one wrapper around every command: flags in, one JSON line out, mistakes in one line.

A command module holds its docstring (which is its `--help`), `define_flags`, `main`, and at its end

    if __name__ == "__main__":
        sys.exit(cli.run(main, define_flags))

Heavy imports stay inside `main`, so that `--help` and a mistyped flag answer at once and touch no
device. Nothing here imports JAX.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from clover_jax import __version__
from clover_jax.cli import command_flags
from clover_jax.cli.help_text import help_text
from clover_jax.errors import UserError
from clover_jax.runtime.compilation_cache import use_compilation_cache
from clover_jax.storage.files import naming
from clover_jax.storage.jsonl import to_json

STATUS_OK = 0
STATUS_SOME_FAILED = 1  # some rows failed, the others are there
STATUS_USER_ERROR = 2
# Shells report a process that a signal ended by these numbers.
STATUS_INTERRUPTED = 128 + signal.SIGINT
STATUS_BROKEN_PIPE = 128 + signal.SIGPIPE

# Includes the names that absl's own programs have.
HELP = {"--help", "-help", "-h", "--helpfull", "--helpshort", "--help=all"}

# What the file system says about a path that a user gave, and what would be right.
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

    main: takes the parsed flags, prints its result by `report`, returns a status (None is 0).
    define_flags: defines the command's flags, common ones included, on the values it is given.
    argv: the arguments without the program's name; those of this process by default.
    The status is main's own; 0 for `--help` and `--version`; 2 with one line on stderr for a user's
    mistake (`UserError`, a bad flag, a path that cannot be used); 130 when interrupted. Any other
    exception is a bug: it passes through with its traceback, and Python makes it status 1.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    command, interrupted = _command_name(main), threading.Event()
    try:
        # After "--" nothing is a flag.
        asked = set(argv[: argv.index("--")] if "--" in argv else argv)
        if "--version" in asked:
            print(f"clover-jax {__version__}")
            return STATUS_OK
        if HELP & asked:
            flags, everything = command_flags.defined(define_flags), "--help=all" in asked
            description = sys.modules[main.__module__].__doc__ or ""
            print(help_text(command, description, flags, everything))
            return STATUS_OK
        flags = command_flags.parse_flags(define_flags, argv)
        # This sets environment variables, which JAX reads when `main` imports it.
        use_compilation_cache()
        with _interrupts_kept(interrupted):
            status = main(flags)
        # Where stdout goes to a full disk, this fails with an error that names stdout.
        with naming("standard output"):
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STATUS_BROKEN_PIPE
    except KeyboardInterrupt:
        _say(command, "interrupted")
        return STATUS_INTERRUPTED
    except Exception as error:
        # A library that is interrupted while it is imported fails in a way of its own.
        if interrupted.is_set():
            _say(command, "interrupted")
            return STATUS_INTERRUPTED
        mistake = _describe_mistake(error)
        if mistake is None:
            error.add_note(f"{command}: this is a bug, not a mistake in what you gave it.")
            raise
        _say(command, mistake)
        return STATUS_USER_ERROR
    return STATUS_OK if status is None else status


def report(result: dict[str, Any]) -> None:
    """Print `result` as one line of JSON, the last line that a command prints on stdout.

    Numbers of NumPy and JAX are accepted; what is not finite becomes null, since JSON has no NaN.
    """
    with naming("standard output"):
        print(to_json(result), flush=True)


@contextlib.contextmanager
def _interrupts_kept(interrupted: threading.Event) -> Iterator[None]:
    """Note a Ctrl-C in an event, and raise KeyboardInterrupt again where Python has dropped it.

    Python drops exceptions within a callback, such as JAX's of the garbage collector. Where Ctrl-C
    is ignored or has another handler, nothing changes.
    """
    # Python runs signal handlers in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def interrupt(number, frame):
        interrupted.set()
        signal.default_int_handler(number, frame)

    def again(unraisable):
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)
            return
        # A little later: here it would be dropped once more.
        main_thread = threading.main_thread().ident
        timer = threading.Timer(0.05, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    hook, sys.unraisablehook = sys.unraisablehook, again
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def stop_signals_as_event() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and Ctrl-C set, so that a loop can save and leave in time.

    A second Ctrl-C interrupts at once. Where Ctrl-C is ignored (a script's background job) it stays
    ignored.
    """
    requested = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def request(number, frame):
        requested.set()
        if number == signal.SIGINT:
            signal.signal(number, before[number])
            # Not by sys.stderr, which may be in the middle of another line.
            os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, request)
    try:
        yield requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _command_name(main: Callable) -> str:
    # A module that runs as a script is called __main__; its spec still has the name.
    module = sys.modules[main.__module__]
    spec = getattr(module, "__spec__", None)
    return spec.name if spec else Path(getattr(module, "__file__", None) or main.__module__).stem


def _say(command: str, message: str) -> None:
    # One line, however a library folds its messages.
    print(f"{command}: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _describe_mistake(error: Exception) -> str | None:
    """Say what the user got wrong and what would be right; None for what is no user's mistake."""
    # absl ends its sentences otherwise; every mistake is one line of ours.
    if isinstance(error, absl_flags.Error):
        return f"{str(error).rstrip(' .')}; see --help"
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _PATH_ADVICE:
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{error.strerror}; {_PATH_ADVICE[error.errno]}"
    return None
