"""Measure this machine's TPU or GPU within a time limit, into a page and a JSON.

    launch/accelerator [--minutes=10] [--rehearse] [--output=experiments/results/hardware]

Commands of the project run one after the other, the most telling first: the tests marked
`accelerator` (equal texts, a chi-square, the kernel beside XLA), `bench` at the shape of
Llama-3-8B, `train` and `evaluate` for tau and speed-up. Meanwhile `experiments.aot` compiles the
same steps ahead of time on another core. Both files are rewritten after every command, so a limit
or an interrupt keeps what was done before it. Compiled programs are kept, so that a second run gets
further. --rehearse does all of it small, on the CPU.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from clover_jax.runtime.files import write_json, write_text
from clover_jax.runtime.provenance import git_revision

REPOSITORY = Path(__file__).parents[1]
PROBE = """
import json, jax
device = jax.devices()[0]
limit = (device.memory_stats() or {}).get("bytes_limit")
named = {"platform": device.platform, "kind": device.device_kind, "devices": jax.device_count()}
print(json.dumps(named | {"memory_gb": limit and round(limit / 1e9, 1)}))
"""
# What a device calls itself, and the name that its ahead-of-time compiler takes.
TARGETS = {
    "TPU v4": "tpu-v4:2x2x1",
    "TPU v5 lite": "tpu-v5e:2x2",
    "TPU v5": "tpu-v5p:2x2x1",
    "TPU v5p": "tpu-v5p:2x2x1",
    "TPU v6 lite": "tpu-v6e:2x2",
    "NVIDIA H200": "gpu-h200",
}
# GB of memory from which a device is asked for so many layers of the 8B shape: weights of base and
# head, and the caches of the five programs that are timed side by side at batch 16.
LAYERS = {28: 32, 18: 16, 12: 8, 0: 4}
SHARE = 0.5  # of the time that one command may take, or one that hangs would leave nothing
GRACE = 10  # seconds that a command has to end by itself
NOT_BEGUN = "not begun"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One command; variables: of its environment, beside those of this process."""

    name: str
    words: tuple[str, ...]
    variables: dict[str, str]

    def run(self, end: float, stop: threading.Event) -> dict:
        """Return how it ended and what it reported; it is ended at the time `end`, or by `stop`."""
        began = time.monotonic()
        if began >= end or stop.is_set():
            return {"status": NOT_BEGUN}

        command = [sys.executable, *self.words]
        environment = os.environ | self.variables
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment, cwd=REPOSITORY
            )
            while process.poll() is None and time.monotonic() < end and not stop.wait(0.05):
                pass
            status = {None: "stopped", 0: "done"}.get(process.returncode, "failed")
            _end(process)
            report, error = _last_line(out), _last_line(err)

        row = {"status": status, "seconds": round(time.monotonic() - began, 1)}
        if status == "done" and report.startswith("{"):
            return row | json.loads(report)
        # pytest reports in words, and what fails says why in its last line.
        return row | {"said": (report if status == "done" else error or report)[:300]}


def _end(process):
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(file):
    file.seek(0)
    lines = [line for line in file.read().splitlines() if line.strip()]
    return lines[-1] if lines else ""


def plan(device, rehearse, folder):
    """Return the stages that run on the device, and those that compile for it meanwhile.

    device: what PROBE says. folder: for what is trained and evaluated.
    """
    platform = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[device["platform"]]
    on_device = {"JAX_PLATFORMS": platform}
    if rehearse:
        shape = "--base=shape:64x1x96", "--dtype=float32", "--context=16"
        timing = "--rounds=3", "--force_accept=1"
        steps = "--steps=2", "--batch_size=2", "--seq_len=32"
        texts = "--limit_prompts=2", "--max_new_tokens=8"
        target, tree = "tpu-v6e:2x2", "chain:2"
    else:
        layers = next(n for least, n in LAYERS.items() if (device["memory_gb"] or 0) >= least)
        # Context and rounds for which a buffer of 1024 positions is long enough.
        shape = f"--base=shape:llama3-8b:{layers}", "--dtype=bfloat16", "--context=800"
        timing = "--rounds=5", "--force_accept=2"
        steps, texts = (), ("--limit_prompts=16", "--max_new_tokens=64")
        target, tree = TARGETS.get(device["kind"]), "paper25"

    # Each bench times plain decoding too, in turns with its head; ahead of time it is its own.
    benches, compiled = [], []
    ways = "xla", "cudnn" if device["platform"] == "gpu" else "pallas"
    for draft, way, rows in itertools.product(("clover2", "plain", "clover_lr"), ways, (1, 16)):
        name, is_plain = f"{draft}, batch {rows}, {way}", draft == "plain"
        model = ("--draft=none",) if is_plain else (f"--draft=random:{draft}", f"--tree={tree}")
        flags = *model, f"--batch_size={rows}", f"--attention={way}"
        if not is_plain:
            words = "-m", "clover_jax.bench", *shape, *flags, *timing
            benches.append(Stage(name, words, on_device))
        if target:
            words = "-m", "experiments.aot", "decode", *shape, *flags, f"--target={target}"
            compiled.append(Stage(f"{name}, ahead of time", words, {"JAX_PLATFORMS": "cpu"}))

    # No trained head is shipped: the quickstart's, which an accelerator trains in a minute.
    head, report = folder / "head", folder / "report"
    recipe = "--flagfile=experiments/clover2.flags", "--eval_every=0", f"--workdir={head}"
    measured = f"--drafts=clover2={head}", "--baselines=none", "--repeats=1", f"--output={report}"
    return [
        Stage("tests", ("-m", "pytest", "-q", "-n0", "-m", "accelerator", "tests"), on_device),
        *benches[:2],
        Stage("train", ("-m", "clover_jax.train", *recipe, *steps), on_device),
        Stage(
            "evaluate",
            ("-m", "clover_jax.evaluate", "--dtype=float32", *measured, *texts),
            on_device,
        ),
        *benches[2:],
    ], compiled


def far_from_floor(stages):
    """Return at most three lines: the parts of a step that lose most time to their floor."""
    # Of each part its worst case, or one slow part would take all lines.
    worst = {}
    for stage, row in stages.items():
        for name, part in row.get("parts", {}).items():
            lost = part["ms"] - part["floor_ms"]
            # The whole step is the sum of the others, and so is the draft of its levels.
            counts = name != "step" and not name.startswith("draft ")
            if counts and lost > worst.get(name, (0.0, ""))[0]:
                times = f", {part['over_floor']:.2f} x its floor" if part["over_floor"] else ""
                worst[name] = lost, f"{name} ({stage}): {part['ms']:.3f} ms{times}"
    return [line for _, line in sorted(worst.values(), reverse=True)[:3]]


def page(report):
    """Return the report for a reader."""
    device, stages = report["device"], report["stages"]
    memory = f", {device['memory_gb']} GB each" if device["memory_gb"] else ""
    lines = [
        f"# {device['kind']}",
        "",
        f"{report['date']}, revision {report['revision']}, by `{report['command']}`: "
        f"{device['devices']} x {device['kind']} ({device['platform']}){memory}.",
        "",
        "Furthest from the floor:",
        "",
        *(f"- {line}" for line in report["far_from_floor"]),
        "",
    ]

    timed = {name: row for name, row in stages.items() if "parts" in row}
    if timed:
        first = next(iter(timed.values()))
        lines += [
            f"{first['base']} with random weights, {first['dtype']}, {first['context']} positions "
            f"committed, {first['tree']}, made to accept {first['force_accept']} a step. Floors "
            f"are of the measured {first['bandwidth_gb_s']} GB/s and {first['matrix_gflop_s']} "
            "GFLOP/s; those ahead of time of the data sheet.",
            "",
            *_table(_TIMED, [_timed_cells(name, stages) for name in timed]),
        ]

    texts = stages["evaluate"]
    if "tau" in texts:
        tau, speedup, equal, mismatches = (
            texts[key]["clover2"] for key in ("tau", "speedup", "equal", "mismatches")
        )
        lines += [
            f"Clover-2 for builtin:tiny, float32, temperature 0: tau {tau:.2f}, {speedup:.2f} "
            f"times as fast as plain decoding; {equal} of {texts['rows']} texts equal to it, "
            f"{mismatches} differ by more than ties.",
            "",
        ]
    ran = [
        (name, row["status"], row.get("seconds"), row.get("said", "").replace("|", "/"))
        for name, row in stages.items()
    ]
    return "\n".join([*lines, *_table(("command", "ended", "seconds", "said"), ran)])


_TIMED = (
    *("measured", "plain ms", "x floor", "step ms", "x floor", "in the engine ms"),
    *("compiling s", "peak GB", "ahead of time: plain ms", "step ms", "its floor ms", "GB"),
)


def _timed_cells(name, stages):
    """Return a row of the table: a bench, and what the compiler said of its steps."""
    row, (_, of_rows) = stages[name], name.split(",", 1)
    plain, step = row["parts"]["plain step"], row["parts"]["step"]
    measured = (
        *(name, plain["ms"], plain["over_floor"], step["ms"], step["over_floor"]),
        *(row["engine_step_ms"], row["compile_seconds"], row["peak_memory_gb"]),
    )
    plain, step = (stages.get(f"{each}, ahead of time", {}) for each in (f"plain,{of_rows}", name))
    if "floor_seconds" not in step:
        return (*measured, _estimate(plain), None, None, None)
    floor = round(1e3 * step["floor_seconds"], 3)
    memory = round((step["argument_bytes"] + step["temporary_bytes"]) / 1e9, 2)
    return (*measured, _estimate(plain), _estimate(step), floor, memory)


def _estimate(ahead):
    """Return the milliseconds of a compiled step; None where it was not compiled."""
    # The compilers for GPUs give no estimate; those for TPUs leave kernels out of theirs.
    if (estimate := ahead.get("estimated_seconds")) is None:
        return None
    return round(1e3 * (estimate + sum(ahead["kernel_seconds_by_part"].values())), 3)


def _table(columns, rows):
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)] + [""]


def measure(seconds, rehearse, output):
    """Run what there is time for; write the page and the JSON after each command."""
    end, stop = time.monotonic() + seconds, threading.Event()
    found = Stage("device", ("-c", PROBE), {"JAX_PLATFORMS": "cpu"} if rehearse else {}).run(
        end, stop
    )
    if found["status"] != "done":
        sys.exit(f"launch/accelerator: no device: {found['status']}; {found.get('said', '')}")
    if found["platform"] == "cpu" and not rehearse:
        sys.exit("launch/accelerator: JAX finds no TPU or GPU; --rehearse runs on the CPU")

    report = {
        "device": {name: found[name] for name in ("platform", "kind", "devices", "memory_gb")},
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "revision": git_revision(),
        "command": "launch/accelerator" + " --rehearse" * rehearse,
    }
    place = output / re.sub(r"[^a-z0-9]+", "_", report["device"]["kind"].lower())
    with tempfile.TemporaryDirectory() as folder:
        on_device, compiled = plan(report["device"], rehearse, Path(folder))
        rows = {stage.name: {"status": NOT_BEGUN} for stage in (*on_device, *compiled)}

        def run(stage, until):
            print(f"{stage.name}: {' '.join(stage.words)}", flush=True)
            rows[stage.name] = {"command": " ".join(stage.words)} | stage.run(until, stop)
            print(f"{stage.name}: {rows[stage.name]['status']}", flush=True)

        def compile_ahead():
            for stage in compiled:
                run(stage, end)

        beside = threading.Thread(target=compile_ahead)
        beside.start()
        try:
            for stage in on_device:
                run(stage, min(end, time.monotonic() + SHARE * seconds))
                _write(place, report, rows)
            beside.join()
        finally:
            stop.set()  # after an interrupt too
            beside.join()
            lines = _write(place, report, rows)
    print("\n".join(["", *lines, "", f"{place}.md and {place}.json"]))


def _write(place, report, rows):
    """Write both files; return what is far from its floor."""
    report = report | {"far_from_floor": far_from_floor(rows), "stages": dict(rows)}
    write_json(f"{place}.json", report)
    write_text(f"{place}.md", page(report))
    return report["far_from_floor"]


def main():
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--output", type=Path)
    flags = parser.parse_args()
    usual = "runs/accelerator" if flags.rehearse else "experiments/results/hardware"
    try:
        measure(flags.seconds, flags.rehearse, flags.output or REPOSITORY / usual)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
